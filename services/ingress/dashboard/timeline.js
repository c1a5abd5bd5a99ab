// The timeline: a row for each stream of the last minutes and for each worker that came or went; and the same as a
// table, for who reads it by ear or wants figures. What is drawn where is computed by spans.js.

import { Row, arrange, byId, element, setText } from './elements.js';
import { NONE, count, milliseconds, sum, tiers, time } from './figures.js';
import { drawn, phasesOf } from './spans.js';
import { legend } from './token_bar.js';

const MOST = { mostStreams: 16, mostWorkers: 6 };
const TICKS = { 30: 3, 60: 4, 300: 5, 900: 3 }; // so that each is a round number
const LETTER_PX = 7;
const GLYPHS = { moved: '◆', lost: '✕', failed: '!', died: '✕', draining: '▽', drained: '▼', joined: '▲' };
const TOLD = { joined: 'joined', draining: 'began to drain', drained: 'had drained', died: 'died' };
const STAY_COLUMNS = [
  ['time', 'id'], ['request', 'id'], ['model', 'name'], ['worker', 'id'], ['queue', 'n'], ['prefill', 'n'],
  ['decode', 'n'], ['cached', 'name'], ['computed', 'n'], ['tokens', 'n'], ['end', 'id'],
];

const percent = (share) => `${(100 * share).toFixed(2)}%`;

function span(className, begin, end, text) {
  const made = element('span', text, className);
  made.style.left = percent(begin);
  made.style.width = percent(end - begin);
  return made;
}

function mark({ at, kind }) {
  const made = element('span', GLYPHS[kind], `mark ${kind}`);
  made.style.left = percent(at);
  return made;
}

function line({ at, kind }) {
  const made = element('span', null, `line ${kind}`);
  made.style.left = percent(at);
  return made;
}

function row(className, label, lane) {
  const made = element('div', null, `course ${className}`);
  made.append(element('span', label, 'label'), lane);
  return made;
}

export class Timeline {
  #answer = null;
  #rows = new Map();

  constructor() {
    this.picture = byId('timeline');
    this.length = byId('timeline-length');
    this.text = byId('timeline-text');
    byId('timeline-legend').append(legend(['queue', 'prefill', 'decode', 'wait']), legend(Object.keys(GLYPHS), GLYPHS));
    this.length.addEventListener('change', () => this.#draw());
    this.text.addEventListener('toggle', () => this.#draw());
  }

  /** Whether a worker came or went since the last answer. */
  fill(answer) {
    const before = this.#answer?.workers.at(-1)?.unix_ms;
    this.#answer = answer;
    this.#draw();
    return answer.workers.at(-1)?.unix_ms !== before;
  }

  clear() {
    this.#answer = null;
    this.#rows.clear();
    this.picture.replaceChildren();
    byId('stays').tBodies[0].replaceChildren();
    byId('moments').replaceChildren();
    setText(byId('timeline-note'), '');
    byId('timeline-section').hidden = true;
  }

  #draw() {
    if (!this.#answer) return;
    byId('timeline-section').hidden = false;
    const seconds = Number(this.length.value);
    const to = this.#answer.now_unix_ms;
    const { streams, workers, lines, hidden } = drawn(this.#answer, to - 1000 * seconds, to, MOST);
    const more = hidden ? `the newest ${count(streams.length)} of ${count(streams.length + hidden)}` : '';
    const none = streams.length || !this.#answer.streams.length ? '' : 'none in this time';
    setText(byId('timeline-note'), more || none);
    const width = this.picture.clientWidth;
    const lane = (children) => {
      const made = element('span', null, 'lane');
      made.append(...lines.map(line), ...children);
      return made;
    };
    this.picture.replaceChildren(
      ...workers.map(({ worker, lives, marks }) =>
        row('worker', worker, lane([
          ...lives.map(({ life, begin, end }) => span(`life ${life}`, begin, end)), ...marks.map(mark)]))),
      ...streams.map(({ spans, marks, workers: at, runs }) =>
        row(runs ? 'stream runs' : 'stream', at.filter((worker, number) => worker !== at[number - 1]).join('→'), lane([
          ...spans.map(({ phase, worker, begin, end }) => {
            const fits = phase === 'decode' && (end - begin) * width > LETTER_PX * (worker.length + 2);
            return span(`phase ${phase}`, begin, end, fits ? worker : '');
          }),
          ...marks.map(mark)]))),
      this.#axis(seconds),
    );
    if (this.text.open) this.#tell(this.#answer);
  }

  #axis(seconds) {
    const lane = element('span', null, 'lane');
    const ticks = TICKS[seconds];
    for (let tick = 0; tick <= ticks; tick += 1) {
      const ago = Math.round(seconds * (1 - tick / ticks));
      const said = ago >= 60 && ago % 60 === 0 ? `${ago / 60} min` : `${ago} s`;
      const made = element('span', ago ? `−${said}` : 'now', 'tick');
      made.style.left = percent(tick / ticks);
      lane.append(made);
    }
    return row('axis', '', lane);
  }

  /** In words and figures. */
  #tell({ streams, workers, now_unix_ms: now }) {
    const wanted = new Map();
    for (const stream of streams) {
      for (const stay of stream.stays) {
        const key = JSON.stringify([stream.tenant, stream.request_id, stay.attempt]);
        const made = this.#rows.get(key) ?? new Row(STAY_COLUMNS);
        made.fill(stayTexts(stream, stay, now));
        wanted.set(key, made);
      }
    }
    this.#rows = wanted;
    arrange(byId('stays').tBodies[0], [...wanted.values()].map((one) => one.node));
    const said = workers.slice(-20).reverse().map((one) => `${time(one.unix_ms)} ${one.worker_id} ${TOLD[one.what]}`);
    const list = byId('moments');
    if ([...list.children].map((one) => one.textContent).join() !== said.join()) {
      list.replaceChildren(...said.map((text) => element('li', text)));
    }
  }
}

function stayTexts(stream, stay, now) {
  const lasted = Object.fromEntries(phasesOf(stay, now).map(([phase, begin, end]) => [phase, end - begin]));
  const cached = stay.cached_tokens;
  return [
    time(stay.placed_unix_ms), stream.request_id, stream.model, stay.worker_id,
    ...['queue', 'prefill', 'decode'].map((phase) => milliseconds(lasted[phase] ?? null)),
    cached ? tiers(cached) || 'nothing' : NONE,
    cached ? count(Math.max(stream.prompt_tokens - sum(cached), 0)) : NONE,
    stay.end === null || stay.end === 'lost' ? NONE : count(stay.output_tokens),
    stay.end ?? 'runs',
  ];
}
