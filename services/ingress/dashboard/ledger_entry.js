// One decision of the ledger: its row, and what a click shows of it. Which decisions there are is ledger.js's.

import { Row, element, setText } from './elements.js';
import { NONE, count, milliseconds, sum, tenth, tiers, time } from './figures.js';
import { TokenBar } from './token_bar.js';

const LEDGER_COLUMNS = [
  ['time', 'id'], ['request', 'id'], ['tenant', 'name'], ['model', 'name'], ['worker', 'id'], ['policy', 'id'],
  ['prompt', 'n'], ['expected', 'n'], ['actual', 'n hit'], ['ttft', 'n'], ['end', 'id'],
];

const ACTUAL = 8;

function ending(actual) {
  if (actual.ended) return actual.error_code ?? 'done';
  if (actual.ttft_ms != null) return 'streaming';
  return actual.accepted ? 'accepted' : 'placed';
}

/** One decision, and what a click shows of it. */
export class Entry extends Row {
  constructor(onToggle) {
    super(LEDGER_COLUMNS);
    this.button = element('button', '', 'link');
    this.button.type = 'button';
    this.button.setAttribute('aria-expanded', 'false');
    this.cells[0].append(this.button);
    this.hit = element('span', '', 'figure');
    this.bar = new TokenBar();
    this.cells[ACTUAL].append(this.hit, this.bar.node);
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
      null, milliseconds(actual.ttft_ms), ending(actual),
    ]);
    setText(this.hit, actual.cached_tokens ? count(sum(actual.cached_tokens)) : NONE);
    this.cells[ACTUAL].title = actual.cached_tokens ? tiers(actual.cached_tokens) || 'nothing' : '';
    this.bar.show(actual.cached_tokens ?? {}, actual.cached_tokens ? placement.prompt_tokens : 0);
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
export function explained(placement) {
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
        (actual.saved_ms ? `restored while it paused: ${milliseconds(actual.saved_ms)} saved; ` : '') +
        `${ending(actual)}; decided by ${placement.placement_id}`,
      'quiet',
    ),
  );
  return parts;
}
