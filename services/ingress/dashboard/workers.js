// The table of workers and the note above it: one row each, as /workers has them, with a button that drains it.

import { DrainDialog } from './drain.js';
import { Row, arrange, element, setText } from './elements.js';
import { NONE, count, rate, seconds, share } from './figures.js';
import { FirstStep, readyLine } from './first_step.js';

const WORKER_COLUMNS = [
  ['worker', 'id'], ['state', 'state'], ['model', 'name'], ['engine', 'name'], ['host', 'name'], ['running', 'n'],
  ['queued', 'n'], ['blocks', 'n blocks'], ['hits', 'n'], ['tokens', 'n'], ['wait', 'n'], ['drain', 'act'],
];

const BLOCKS = 7;
const DRAIN = 11;

/** Its state, or what it does while it starts. */
function doing({ state, loading }) {
  if (!loading || state !== 'starting') return state;
  return loading.total_bytes ? `${loading.doing} ${share(loading.weight_bytes / loading.total_bytes)}` : loading.doing;
}

/** Its engine, and the half of requests that it is for. */
const kind = ({ engine, role }) => (role === 'prefill' || role === 'decode' ? `${engine}, ${role}` : engine);

class WorkerRow extends Row {
  constructor(onDrain) {
    super(WORKER_COLUMNS);
    this.drain = element('button', 'Drain');
    this.drain.type = 'button';
    this.drain.addEventListener('click', onDrain);
    this.cells[DRAIN].append(this.drain);
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
      ? [NONE, NONE, null, NONE, NONE, NONE, null]
      : [
          count(load.running), count(load.waiting), null, share(rates.hitRate(id)), rate(rates.tokensPerSecond(id)),
          seconds(load.oldest_wait_s), null,
        ];
    this.drain.disabled = dead || state === 'draining';
    this.drain.setAttribute('aria-label', `Drain ${id}`);
    this.node.dataset.state = state;
    this.fill([id, doing(worker), worker.model, kind(worker), worker.host, ...now]);
    setText(this.blocks, dead ? NONE : `${count(load.blocks_used)} / ${count(load.blocks_total)}`);
    this.cells[BLOCKS].title = dead ? '' : `${count(load.blocks_used)} in use, ${count(load.blocks_cached)} cached`;
    const part = (blocks) => (dead || !load.blocks_total ? '0' : `${(100 * blocks) / load.blocks_total}%`);
    this.used.style.width = part(load.blocks_used);
    this.cached.style.width = part(load.blocks_cached);
  }
}

export class WorkersTable {
  #rows = new Map();
  #workers = {};
  #dialog = new DrainDialog();
  #first = new FirstStep('workers-first');

  constructor(table, note) {
    this.body = table.tBodies[0];
    this.note = note;
  }

  fill(workers, rates) {
    this.#workers = workers;
    for (const id of [...this.#rows.keys()]) if (!(id in workers)) this.#rows.delete(id);
    const wanted = Object.entries(workers).map(([id, worker]) => {
      const row = this.#rows.get(id) ?? new WorkerRow(() => this.#dialog.ask(id, this.#workers));
      this.#rows.set(id, row);
      row.show(id, worker, rates);
      return row.node;
    });
    arrange(this.body, wanted);
    this.#say('');
    if (wanted.length) this.#first.hide();
    else this.#first.show('No worker has registered yet. kvfleet worker --help says how to start one; what is missing:', readyLine());
  }

  clear(text) {
    this.#rows.clear();
    this.body.replaceChildren();
    this.#first.hide();
    this.#say(text);
  }

  #say(text) {
    setText(this.note, text);
    this.note.hidden = !text;
  }
}
