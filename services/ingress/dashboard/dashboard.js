// The dashboard: asks the ingress once a second, shows what it says, and holds a conversation with a model.
//
//   Poller ──▶ /stats, /workers, /v1/placements ──▶ Rates ──▶ views        one request at a time
//   Chat   ──▶ /v1/chat/completions, streamed                              by itself
//
// What the server says reaches the page as text alone (textContent), never as markup. The key lives in this tab's
// sessionStorage and in the Authorization header, nowhere else.

const BASE = new URL('..', import.meta.url);
const PERIOD_MS = 1000;
const HIDDEN_PERIOD_MS = 15000;
const LOCKED_PERIOD_MS = 3000;
const TIMEOUT_MS = 5000;
const HIT_WINDOW_S = 60;
const DRAW_MS = 50;
const TOKENS_WINDOW_S = 5;
const POINTS = 60;
const LEDGER_LENGTH = 50;
const KEY = 'kvfleet-api-key';
const NONE = '–';

const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------- text

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat('en', {
  minimumFractionDigits: 1, maximumFractionDigits: 1, signDisplay: 'negative', // never -0.0
});

const count = (value) => (value == null ? NONE : whole.format(value));
const share = (value) => (value == null ? NONE : `${tenth.format(value * 100)}%`);
const rate = (value) => (value == null ? NONE : (value < 10 ? tenth : whole).format(value));
const time = (unixMs) => new Date(unixMs).toLocaleTimeString('en-GB');

function milliseconds(value) {
  if (value == null) return NONE;
  return value < 1000 ? `${(value < 10 ? tenth : whole).format(value)} ms` : `${tenth.format(value / 1000)} s`;
}

function seconds(value) {
  return value ? milliseconds(value * 1000) : NONE;
}

function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? tenth.format(value) : value} ${['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}`;
}

const sum = (values) => Object.values(values).reduce((total, one) => total + one, 0);

function tiers(tokens) {
  const held = Object.entries(tokens).filter(([, number]) => number);
  return held.map(([tier, number]) => `${tier} ${count(number)}`).join(', ');
}

// ---------------------------------------------------------------------------------------------- elements

function element(name, text, className) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** `rows` become the body's children in this order; those that stay are not touched, and keep the focus. */
function arrange(body, rows) {
  let at = body.firstChild;
  for (const row of rows) {
    if (row === at) at = at.nextSibling;
    else body.insertBefore(row, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** A row of text cells; null leaves one as it is. */
class Row {
  constructor(columns) {
    this.node = element('tr');
    this.cells = columns.map(([name, className]) => {
      const cell = element('td', '', className);
      cell.dataset.column = name;
      this.node.append(cell);
      return cell;
    });
  }

  fill(texts) {
    texts.forEach((text, at) => {
      const cell = this.cells[at];
      if (text === null || cell.textContent === text) return;
      cell.textContent = text;
      if (cell.classList.contains('name')) cell.title = text; // what does not fit is cut
    });
  }
}

const SVG = 'http://www.w3.org/2000/svg';

function sparkline() {
  const picture = document.createElementNS(SVG, 'svg');
  picture.setAttribute('viewBox', `0 0 ${POINTS - 1} 20`);
  picture.setAttribute('preserveAspectRatio', 'none');
  picture.setAttribute('aria-hidden', 'true');
  const line = document.createElementNS(SVG, 'polyline');
  picture.append(line);
  return [picture, line];
}

/** From the right; a point that is not known is left out. `top`: what fills the height at least. */
function points(values, top) {
  const highest = Math.max(top, ...values.map((value) => value ?? 0));
  const first = POINTS - values.length;
  return values
    .map((value, at) => (value == null ? '' : `${first + at},${(19 - (18 * value) / highest).toFixed(1)}`))
    .filter(Boolean)
    .join(' ');
}

// ---------------------------------------------------------------------------------------------- rates

const COUNTED = { prompt: 'prompt_tokens_total', hit: 'hit_tokens_total', generated: 'generated_tokens_total' };

/** What workers' counters grew by, sample by sample. A worker's new life counts from its second sample on. */
class Rates {
  #before = new Map();
  #beforeAt = 0;
  #steps = [];

  /** `workers` as /workers has them, `at` in seconds. */
  add(workers, at) {
    const now = new Map();
    const grown = new Map();
    for (const [id, worker] of Object.entries(workers)) {
      const key = `${id}/${worker.epoch}`;
      const counters = Object.fromEntries(Object.entries(COUNTED).map(([name, field]) => [name, worker.load[field]]));
      now.set(key, counters);
      const was = this.#before.get(key);
      if (!was) continue;
      const more = Object.keys(COUNTED).map((name) => [name, Math.max(counters[name] - was[name], 0)]);
      grown.set(id, Object.fromEntries(more));
    }
    if (this.#before.size) this.#steps.push({ at, seconds: at - this.#beforeAt, grown });
    this.#before = now;
    this.#beforeAt = at;
    while (this.#steps.length && this.#steps[0].at <= at - HIT_WINDOW_S) this.#steps.shift();
  }

  /** Share of prompt tokens that were found in a cache within the last minute; null: nothing was asked. */
  hitRate(id) {
    const { prompt, hit } = this.#within(HIT_WINDOW_S, id);
    return prompt ? Math.min(hit / prompt, 1) : null;
  }

  /** Generated within the last seconds; null: not known yet. */
  tokensPerSecond(id) {
    const { generated, seconds: over } = this.#within(TOKENS_WINDOW_S, id);
    return over ? generated / over : null;
  }

  #within(window, id) {
    const total = { prompt: 0, hit: 0, generated: 0, seconds: 0 };
    for (const step of this.#steps) {
      if (step.at <= this.#beforeAt - window) continue;
      total.seconds += step.seconds;
      for (const [worker, more] of step.grown) {
        if (id !== undefined && worker !== id) continue;
        for (const name of Object.keys(COUNTED)) total[name] += more[name];
      }
    }
    return total;
  }
}

// ---------------------------------------------------------------------------------------------- the ingress

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const Session = {
  get key() {
    return sessionStorage.getItem(KEY) ?? '';
  },
  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  },
};

class Away extends Error {}

/** As the API says it, whatever came. */
async function errorOf(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no body of the API's: something between here and it answered
  }
  return new Refused(response.status, message);
}

/** Raises Refused for what the API refuses, Away where nothing answers in time. */
async function ask(path) {
  const asked = { headers: Session.headers(), signal: AbortSignal.timeout(TIMEOUT_MS), cache: 'no-store' };
  try {
    const response = await fetch(new URL(path, BASE), asked);
    if (!response.ok && !(path === 'health' && response.status === 503)) throw await errorOf(response);
    return await response.json();
  } catch (error) {
    throw error instanceof Refused ? error : new Away(String(error));
  }
}

// ---------------------------------------------------------------------------------------------- fleet

/** The line of sums, each with its last minute. */
class FleetLine {
  #tiles = new Map();

  constructor(list) {
    for (const [name, label, top] of [
      ['workers', 'workers ready', 1],
      ['placements', 'placements', 1],
      ['vaults', 'vaults', 1],
      ['models', 'models', 1],
      ['running', 'streams running', 1],
      ['queued', 'queued', 1],
      ['tokens', 'tokens/s', 1],
      ['hits', 'hit rate, last minute (all)', 1],
    ]) {
      const tile = element('div');
      const value = element('dd', NONE);
      const more = element('span', '', 'quiet');
      const [picture, line] = sparkline();
      tile.append(element('dt', label), value, picture);
      list.append(tile);
      this.#tiles.set(name, { value, more, line, top, values: [] });
    }
  }

  show(name, number, text, about = '') {
    const tile = this.#tiles.get(name);
    tile.value.textContent = text;
    tile.more.textContent = about;
    if (about) tile.value.append(' ', tile.more);
    tile.value.title = name === 'models' ? about : '';
    tile.values.push(number);
    if (tile.values.length > POINTS) tile.values.shift();
    tile.line.setAttribute('points', points(tile.values, tile.top));
  }

  fill(stats, rates) {
    const tokens = rates.tokensPerSecond();
    const hits = rates.hitRate();
    this.show('workers', stats.ready, count(stats.ready), `of ${count(stats.workers)}`);
    this.show('placements', stats.placements, count(stats.placements));
    this.show('vaults', stats.vaults, count(stats.vaults));
    this.show('models', stats.models.length, count(stats.models.length), stats.models.join(', '));
    this.show('running', stats.load.running, count(stats.load.running));
    this.show('queued', stats.load.waiting, count(stats.load.waiting));
    this.show('tokens', tokens, rate(tokens));
    this.show('hits', hits, share(hits), `(${share(stats.hit_rate)})`);
  }

  /** What everybody may know. */
  fillPublic(health, models) {
    this.show('workers', health.workers_ready, count(health.workers_ready));
    this.show('placements', health.placements, count(health.placements));
    this.show('vaults', health.vaults, count(health.vaults));
    if (models) this.show('models', models.length, count(models.length), models.join(', '));
    else this.show('models', null, NONE);
    for (const name of ['running', 'queued', 'tokens', 'hits']) this.show(name, null, NONE);
  }
}

const WORKER_COLUMNS = [
  ['worker', 'id'], ['state', 'state'], ['model', 'name'], ['host', 'name'], ['running', 'n'], ['queued', 'n'],
  ['blocks', 'n blocks'], ['hits', 'n'], ['tokens', 'n'], ['wait', 'n'],
];

const BLOCKS = 6;

class WorkerRow extends Row {
  constructor() {
    super(WORKER_COLUMNS);
    this.blocks = element('span', '', 'figure');
    this.used = element('span', null, 'used');
    this.cached = element('span', null, 'cached');
    const bar = element('span', null, 'bar');
    bar.setAttribute('aria-hidden', 'true');
    bar.append(this.used, this.cached);
    this.cells[BLOCKS].append(this.blocks, bar);
  }

  show(id, worker, rates) {
    const { load, state } = worker;
    const dead = state === 'dead';
    const now = dead
      ? [NONE, NONE, null, NONE, NONE, NONE]
      : [
          count(load.running), count(load.waiting), null, share(rates.hitRate(id)), rate(rates.tokensPerSecond(id)),
          seconds(load.oldest_wait_s),
        ];
    this.node.dataset.state = state;
    this.fill([id, state, worker.model, worker.host, ...now]);
    setText(this.blocks, dead ? NONE : `${count(load.blocks_used)} / ${count(load.blocks_total)}`);
    this.cells[BLOCKS].title = dead ? '' : `${count(load.blocks_used)} in use, ${count(load.blocks_cached)} cached`;
    const part = (blocks) => (dead || !load.blocks_total ? '0' : `${(100 * blocks) / load.blocks_total}%`);
    this.used.style.width = part(load.blocks_used);
    this.cached.style.width = part(load.blocks_cached);
  }
}

class WorkersTable {
  #rows = new Map();

  constructor(table) {
    this.body = table.tBodies[0];
  }

  /** How many there are. */
  fill(workers, rates) {
    for (const id of [...this.#rows.keys()]) if (!(id in workers)) this.#rows.delete(id);
    const wanted = Object.entries(workers).map(([id, worker]) => {
      const row = this.#rows.get(id) ?? new WorkerRow();
      this.#rows.set(id, row);
      row.show(id, worker, rates);
      return row.node;
    });
    arrange(this.body, wanted);
    return wanted.length;
  }

  clear() {
    this.#rows.clear();
    this.body.replaceChildren();
  }
}

const TIER_COLUMNS = [
  ['tier', 'id'], ['blocks', 'n'], ['held', 'n'], ['hits', 'n'], ['restored', 'n'], ['offloaded', 'n'],
  ['evicted', 'n'], ['failures', 'name'],
];

class TiersTable {
  #rows = new Map();

  constructor(table) {
    this.body = table.tBodies[0];
  }

  fill({ load }) {
    const below = Object.entries(load.tiers);
    const brought = below.reduce((total, [, tier]) => total + tier.hit_tokens_total, 0);
    const lines = [
      [
        'device',
        `${count(load.blocks_used + load.blocks_cached)} / ${count(load.blocks_total)}`,
        share(load.blocks_total ? (load.blocks_used + load.blocks_cached) / load.blocks_total : null),
        count(Math.max(load.hit_tokens_total - brought, 0)),
        NONE, NONE, count(load.evictions_total), 'none',
      ],
    ];
    for (const [name, tier] of below) {
      const failures = Object.entries(tier.failures_total).filter(([, number]) => number);
      const size = tier.bytes_total ? `${bytes(tier.bytes_used)} / ${bytes(tier.bytes_total)}` : NONE;
      lines.push([
        name,
        tier.bytes_total ? count(tier.blocks) : NONE,
        size,
        count(tier.hit_tokens_total),
        tier.restores_total ? `${bytes(tier.restored_bytes_total)} in ${count(tier.restores_total)}` : '0',
        count(tier.offloaded_blocks_total),
        count(tier.evictions_total),
        failures.map(([why, number]) => `${why} ${count(number)}`).join(', ') || 'none',
      ]);
    }
    const wanted = lines.map((line) => {
      const row = this.#rows.get(line[0]) ?? new Row(TIER_COLUMNS);
      this.#rows.set(line[0], row);
      row.fill(line);
      return row.node;
    });
    arrange(this.body, wanted);
  }

  clear() {
    this.#rows.clear();
    this.body.replaceChildren();
  }
}

// ---------------------------------------------------------------------------------------------- ledger

const LEDGER_COLUMNS = [
  ['time', 'id'], ['request', 'id'], ['tenant', 'name'], ['model', 'name'], ['worker', 'id'], ['policy', 'id'],
  ['prompt', 'n'], ['expected', 'n'], ['actual', 'n'], ['ttft', 'n'], ['end', 'id'],
];

function ending(actual) {
  if (actual.ended) return actual.error_code ?? 'done';
  if (actual.ttft_ms != null) return 'streaming';
  return actual.accepted ? 'accepted' : 'placed';
}

/** One decision, and what a click shows of it. */
class Entry extends Row {
  constructor(onToggle) {
    super(LEDGER_COLUMNS);
    this.button = element('button', '', 'link');
    this.button.type = 'button';
    this.button.setAttribute('aria-expanded', 'false');
    this.cells[0].append(this.button);
    this.detail = null;
    this.node.addEventListener('click', () => {
      if (!String(getSelection()).trim()) onToggle(this); // whoever marks an id wants to copy it
    });
  }

  show(placement) {
    const { actual } = placement;
    const attempt = placement.attempt ? ` #${placement.attempt}` : '';
    setText(this.button, time(placement.decided_unix_ms));
    this.fill([
      null,
      placement.request_id + attempt, placement.tenant, placement.model, placement.worker_id, placement.policy,
      count(placement.prompt_tokens), count(sum(placement.expected_hit_tokens)),
      actual.cached_tokens ? count(sum(actual.cached_tokens)) : NONE,
      milliseconds(actual.ttft_ms), ending(actual),
    ]);
    this.node.classList.toggle('failed', Boolean(actual.error_code));
    this.placement = placement;
  }

  open() {
    const cell = element('td');
    cell.colSpan = LEDGER_COLUMNS.length;
    this.about = element('div');
    this.about.append(...explained(this.placement));
    cell.append(this.about);
    this.detail = element('tr', null, 'detail');
    this.detail.append(cell);
    this.button.setAttribute('aria-expanded', 'true');
  }

  close() {
    this.detail = null;
    this.button.setAttribute('aria-expanded', 'false');
  }
}

/** Why a request went where it went: the text, the candidates with their costs, what was expected and what came. */
function explained(placement) {
  const { actual, candidates } = placement;
  const parts = [element('p', placement.why)];
  if (placement.source_worker_id) {
    const had = count(placement.source_tokens);
    parts.push(element('p', `may pull from ${placement.source_worker_id}, which has ${had} tokens of the prompt`));
  }
  const terms = [...new Set(candidates.flatMap((one) => Object.keys(one.terms_ms)))];
  const table = element('table');
  const head = element('tr');
  for (const title of ['candidate', ...terms.map((term) => `${term} ms`), 'cost ms', 'holds']) {
    const cell = element('th', title, ['candidate', 'holds'].includes(title) ? '' : 'n');
    cell.scope = 'col';
    head.append(cell);
  }
  const thead = element('thead');
  thead.append(head);
  const body = element('tbody');
  for (const one of candidates) {
    const row = element('tr', null, one.chosen ? 'chosen' : '');
    row.append(element('td', one.chosen ? `${one.worker_id} (chosen)` : one.worker_id));
    const figures = [...terms.map((term) => one.terms_ms[term]), one.cost_ms];
    for (const value of figures) row.append(element('td', value == null ? NONE : tenth.format(value), 'n'));
    row.append(element('td', tiers(one.matched_tokens) || 'nothing'));
    body.append(row);
  }
  table.append(thead, body);
  parts.push(table);
  const hidden = placement.candidates_total - candidates.length;
  if (hidden > 0) parts.push(element('p', `and ${count(hidden)} further candidates`, 'quiet'));
  const found = actual.cached_tokens ? tiers(actual.cached_tokens) || 'nothing' : 'not known yet';
  parts.push(
    element(
      'p',
      `cached: expected ${tiers(placement.expected_hit_tokens) || 'nothing'}, found ${found}; ` +
        `TTFT: expected ${milliseconds(placement.expected_ttft_ms)}, was ${milliseconds(actual.ttft_ms)}; ` +
        `queued ${milliseconds(actual.queue_ms)}; ${count(actual.output_tokens)} tokens generated; ` +
        `${ending(actual)}; decided by ${placement.placement_id}`,
      'quiet',
    ),
  );
  return parts;
}

class Ledger {
  #entries = new Map();

  constructor(table, note) {
    this.body = table.tBodies[0];
    this.note = note;
  }

  get #opened() {
    return [...this.#entries.values()].filter((entry) => entry.detail);
  }

  /** Stands still while an entry is open: it would be gone before it is read. */
  fill(placements) {
    const name = (one) => `${one.tenant}/${one.request_id}/${one.attempt}`;
    const standing = this.#opened.length > 0;
    const news = placements.filter((one) => !this.#entries.has(name(one))).length;
    if (!standing) {
      const wanted = new Set(placements.map(name));
      for (const key of [...this.#entries.keys()]) if (!wanted.has(key)) this.#entries.delete(key);
    }
    for (const one of placements) {
      let entry = this.#entries.get(name(one));
      if (!entry && standing) continue;
      if (!entry) {
        entry = new Entry((toggled) => this.#toggle(toggled));
        this.#entries.set(name(one), entry);
      }
      entry.show(one);
      if (entry.detail) entry.about.replaceChildren(...explained(one));
    }
    if (!standing) arrange(this.body, placements.map((one) => this.#entries.get(name(one)).node));
    setText(this.note, standing ? `stands still while an entry is open, ${count(news)} newer` : this.#summary());
  }

  clear(text = '') {
    this.#entries.clear();
    this.body.replaceChildren();
    setText(this.note, text);
  }

  #summary() {
    return this.#entries.size ? 'open an entry for its candidates and costs' : 'no decisions yet';
  }

  #toggle(entry) {
    if (entry.detail) {
      entry.detail.remove();
      entry.close();
    } else {
      entry.open();
      entry.node.after(entry.detail);
    }
  }
}

// ---------------------------------------------------------------------------------------------- chat

/** The JSON of each `data:` line, until `[DONE]`. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

class Chat {
  #messages = [];
  #running = null; // the AbortController of the turn that streams

  constructor() {
    this.turns = byId('turns');
    this.model = byId('chat-model');
    this.said = byId('said');
    byId('chat-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#send();
    });
    this.said.addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId('chat-stop').addEventListener('click', () => this.#running?.abort());
    byId('chat-new').addEventListener('click', () => this.#begin());
  }

  offer(models) {
    fillChoices(this.model, models);
  }

  #begin() {
    this.#running?.abort();
    this.#messages = [];
    this.turns.replaceChildren();
    this.said.focus();
  }

  #busy(controller) {
    this.#running = controller;
    byId('chat-send').disabled = Boolean(controller);
    byId('chat-stop').disabled = !controller;
    this.turns.setAttribute('aria-busy', String(Boolean(controller)));
  }

  #bubble(who, text) {
    const turn = element('div', null, `turn ${who}`);
    const body = element('p', null, 'text');
    const shown = document.createTextNode(text);
    body.append(shown);
    const about = element('p', '', 'quiet');
    turn.append(element('p', who === 'user' ? 'you' : this.model.value, 'who'), body, about);
    this.turns.append(turn);
    this.#scroll(true);
    return { turn, text: shown, about };
  }

  #scroll(always) {
    const { scrollHeight, scrollTop, clientHeight } = this.turns;
    if (always || scrollHeight - scrollTop - clientHeight < 80) this.turns.scrollTop = scrollHeight;
  }

  async #send() {
    const said = this.said.value.trim();
    if (!said || this.#running) return;
    const conversation = this.#messages;
    const asked = this.#bubble('user', said);
    const shown = this.#bubble('assistant', '');
    this.said.value = '';
    const controller = new AbortController();
    this.#busy(controller);
    const turn = { began: performance.now(), first: 0, last: 0, pieces: 0, text: '', timer: 0, usage: null, fleet: null };
    try {
      await this.#stream([...conversation, { role: 'user', content: said }], turn, shown, controller.signal);
      this.#draw(turn, shown);
    } catch (error) {
      this.#draw(turn, shown);
      if (controller.signal.aborted) {
        shown.about.textContent = `stopped · ${aboutTurn(turn)}`;
      } else {
        const reason = error instanceof Refused ? error.message : 'the ingress does not answer';
        shown.turn.classList.add('failed');
        asked.turn.classList.add('failed');
        shown.about.textContent = `${reason} (this turn is not part of the conversation)`;
        shown.about.setAttribute('role', 'alert');
        if (!this.said.value) this.said.value = said;
        turn.text = '';
      }
    }
    // A stopped turn counts as far as it went: its tokens are cached, the next turn's prefix begins with them.
    if (turn.text) conversation.push({ role: 'user', content: said }, { role: 'assistant', content: turn.text });
    if (this.#running === controller) this.#busy(null);
    this.#scroll(false);
  }

  async #stream(messages, turn, shown, signal) {
    const limit = Number.parseInt(byId('chat-max').value, 10);
    const response = await fetch(new URL('v1/chat/completions', BASE), {
      method: 'POST',
      headers: { 'content-type': 'application/json', ...Session.headers() },
      body: JSON.stringify({
        model: this.model.value,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        ...(limit > 0 ? { max_tokens: limit } : {}),
      }),
      signal,
    });
    if (!response.ok) throw await errorOf(response);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Refused(response.status, event.error.message);
      turn.usage = event.usage ?? turn.usage;
      turn.fleet = event.kvfleet ?? turn.fleet;
      for (const choice of event.choices) {
        if (!choice.delta.content) continue;
        turn.last = performance.now();
        turn.first ||= turn.last;
        turn.pieces += 1;
        turn.text += choice.delta.content;
        turn.timer ||= setTimeout(() => this.#draw(turn, shown), DRAW_MS);
      }
    }
  }

  /** Not with each token: a fast model would keep the page too busy to hear a click. */
  #draw(turn, shown) {
    clearTimeout(turn.timer);
    turn.timer = 0;
    shown.text.appendData(turn.text.slice(shown.text.length));
    shown.about.textContent = aboutTurn(turn);
    this.#scroll(false);
  }
}

/** What was reused, how soon it began, how fast it went. */
function aboutTurn(turn) {
  const parts = [];
  if (turn.usage) {
    const { prompt_tokens: prompt, completion_tokens: generated } = turn.usage;
    const cached = turn.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${count(cached)} of ${count(prompt)} prompt tokens cached`, `${count(generated)} generated`);
  }
  if (turn.first) parts.push(`TTFT ${milliseconds(turn.first - turn.began)}`);
  const generated = turn.usage?.completion_tokens ?? turn.pieces;
  const over = (turn.last - turn.first) / 1000;
  if (over > (turn.usage ? 0 : 0.25) && generated > 1) parts.push(`${rate((generated - 1) / over)} tokens/s`);
  if (turn.fleet?.worker_id) parts.push(turn.fleet.worker_id);
  return parts.join(' · ');
}

/** The choice that was made stays, while there is one of that name. `first`: a choice before all names. */
function fillChoices(select, names, first = []) {
  const wanted = [...first.map(([value]) => value), ...names];
  if (JSON.stringify([...select.options].map((one) => one.value)) === JSON.stringify(wanted)) return;
  const chosen = select.value;
  const made = [...first, ...names.map((name) => [name, name])].map(([value, label]) => {
    const option = element('option', label);
    option.value = value;
    return option;
  });
  select.replaceChildren(...made);
  if (wanted.includes(chosen)) select.value = chosen;
}

// ---------------------------------------------------------------------------------------------- the page

const Access = { UNKNOWN: 'unknown', ADMIN: 'admin', TENANT: 'tenant', LOCKED: 'locked' };

class Page {
  #access = Access.UNKNOWN;
  #why = ''; // it is locked
  #rates = new Rates();
  #line = new FleetLine(byId('fleet'));
  #workers = new WorkersTable(byId('workers'));
  #tiers = new TiersTable(byId('tiers'));
  #ledger = new Ledger(byId('ledger'), byId('ledger-note'));
  #chat = new Chat();
  #awaySince = null;
  #timer = 0;
  #polling = false;
  #again = false;

  start() {
    byId('key-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#use(byId('key').value.trim());
      byId('key').value = '';
    });
    byId('key-forget').addEventListener('click', () => this.#use(''));
    byId('ledger-model').addEventListener('change', () => {
      this.#ledger.clear();
      this.#soon();
    });
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.#soon();
    });
    this.#poll();
  }

  #use(key) {
    Session.key = key;
    this.#access = Access.UNKNOWN;
    this.#why = '';
    this.#rates = new Rates();
    this.#ledger.clear();
    this.#soon();
  }

  /** Now, or as soon as what is under way has ended. */
  #soon() {
    this.#again = this.#polling;
    if (!this.#polling) {
      clearTimeout(this.#timer);
      this.#poll();
    }
  }

  async #poll() {
    this.#polling = true;
    const used = Session.key;
    try {
      await this.#read();
      this.#awaySince = null;
      document.body.classList.remove('away');
    } catch (error) {
      if (used === Session.key) this.#failed(error);
    }
    this.#polling = false;
    let period = this.#access === Access.LOCKED ? LOCKED_PERIOD_MS : PERIOD_MS;
    if (document.hidden) period = HIDDEN_PERIOD_MS;
    if (this.#again) period = 0;
    this.#again = false;
    this.#timer = setTimeout(() => this.#poll(), period);
  }

  /** Each in its turn. Raises what `ask` does. */
  async #read() {
    if (this.#access === Access.LOCKED) {
      this.#line.fillPublic(await ask('health'), null);
      this.#say(this.#why);
      return;
    }
    const stats = this.#access === Access.TENANT ? null : await this.#stats();
    if (this.#access === Access.LOCKED) {
      this.#line.fillPublic(await ask('health'), null);
      return;
    }
    const chosen = byId('ledger-model').value;
    if (stats) {
      const workers = await ask('workers');
      this.#rates.add(workers, performance.now() / 1000);
      this.#line.fill(stats, this.#rates);
      const shown = this.#workers.fill(workers, this.#rates);
      this.#tiers.fill(stats);
      this.#note(shown ? '' : 'No worker has registered yet.');
    }
    const models = stats ? stats.models : (await ask('v1/models')).data.map((one) => one.id);
    if (!stats) this.#line.fillPublic(await ask('health'), models);
    this.#chat.offer(models);
    fillChoices(byId('ledger-model'), models, [['', 'all']]);
    let unplaced = '';
    try {
      const model = chosen ? `&model=${encodeURIComponent(chosen)}` : '';
      this.#ledger.fill((await ask(`v1/placements?limit=${LEDGER_LENGTH}${model}`)).placements);
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 503) throw error;
      unplaced = error.message; // the rest of the fleet is there
    }
    this.#show(stats, models, unplaced);
  }

  async #stats() {
    const key = Session.key;
    try {
      const stats = await ask('stats');
      this.#access = Access.ADMIN;
      return stats;
    } catch (error) {
      if (key !== Session.key || !(error instanceof Refused) || ![401, 403].includes(error.status)) throw error;
      if (error.status === 401) this.#lock(error);
      else {
        this.#access = Access.TENANT;
        this.#workers.clear();
        this.#tiers.clear();
        this.#note('Workers and tiers need an admin key. With this one: the chat, and the ledger of its own tenant.');
      }
      return null;
    }
  }

  /** What was refused is not kept, and no more is asked with it. */
  #lock(error) {
    this.#access = Access.LOCKED;
    this.#why = Session.key ? `The key was refused: ${error.message}` : 'This ingress asks for an API key';
    Session.key = '';
    this.#workers.clear();
    this.#tiers.clear();
    this.#ledger.clear('needs a key');
    this.#chat.offer([]);
    this.#note('Workers need an admin key.');
    this.#say(this.#why);
    this.#keys(true);
  }

  #show(stats, models, unplaced) {
    this.#keys(Boolean(Session.key));
    if (stats && !stats.ready) this.#say('No worker is ready');
    else if (unplaced) this.#say(`The ledger is not to be had: ${unplaced}`);
    else if (!models.length) this.#say('No model is served yet');
    else this.#say('Live', 'live');
  }

  #keys(asked) {
    byId('key-form').hidden = !asked;
    byId('key-forget').hidden = !Session.key;
    byId('key').placeholder = Session.key ? 'one is in use' : '';
  }

  #failed(error) {
    if (error instanceof Refused && error.status === 401) {
      this.#lock(error);
      return;
    }
    document.body.classList.add('away');
    if (!(error instanceof Refused || error instanceof Away)) {
      console.error(error);
      this.#say(`This page has a fault: ${error}`, 'bad');
      return;
    }
    this.#awaySince ??= Date.now();
    const since = time(this.#awaySince);
    if (error instanceof Refused) this.#say(`The ingress answers with an error since ${since}: ${error.message}`, 'bad');
    else this.#say(`The ingress does not answer since ${since}; what is shown is of before. Trying again`, 'bad');
  }

  #note(text) {
    const note = byId('workers-note');
    setText(note, text);
    note.hidden = !text;
  }

  /** Said aloud only when it changes. */
  #say(text, kind = 'warn') {
    setText(byId('status'), text);
    byId('status').dataset.kind = kind;
  }
}

new Page().start();
