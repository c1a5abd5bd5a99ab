// The table of workers and the note above it: one row each, as /workers has them.

import { Row, arrange, element, setText } from './elements.js';
import { NONE, count, rate, seconds, share } from './figures.js';

const WORKER_COLUMNS = [
  ['worker', 'id'], ['state', 'state'], ['model', 'name'], ['engine', 'name'], ['host', 'name'], ['running', 'n'],
  ['queued', 'n'], ['blocks', 'n blocks'], ['hits', 'n'], ['tokens', 'n'], ['wait', 'n'],
];

const BLOCKS = 7;

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
    this.fill([id, state, worker.model, worker.engine, worker.host, ...now]);
    setText(this.blocks, dead ? NONE : `${count(load.blocks_used)} / ${count(load.blocks_total)}`);
    this.cells[BLOCKS].title = dead ? '' : `${count(load.blocks_used)} in use, ${count(load.blocks_cached)} cached`;
    const part = (blocks) => (dead || !load.blocks_total ? '0' : `${(100 * blocks) / load.blocks_total}%`);
    this.used.style.width = part(load.blocks_used);
    this.cached.style.width = part(load.blocks_cached);
  }
}

export class WorkersTable {
  #rows = new Map();

  constructor(table, note) {
    this.body = table.tBodies[0];
    this.note = note;
  }

  fill(workers, rates) {
    for (const id of [...this.#rows.keys()]) if (!(id in workers)) this.#rows.delete(id);
    const wanted = Object.entries(workers).map(([id, worker]) => {
      const row = this.#rows.get(id) ?? new WorkerRow();
      this.#rows.set(id, row);
      row.show(id, worker, rates);
      return row.node;
    });
    arrange(this.body, wanted);
    this.#say(wanted.length ? '' : 'No worker has registered yet.');
  }

  clear(text) {
    this.#rows.clear();
    this.body.replaceChildren();
    this.#say(text);
  }

  #say(text) {
    setText(this.note, text);
    this.note.hidden = !text;
  }
}
