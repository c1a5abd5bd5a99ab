// Who holds the blocks of the conversation: each worker's leading tokens, tier by tier. It is asked for after a turn, and
// by a button: each question counts as a request of its key.

import { Away, Refused, ask } from './api.js';
import { byId, element, setText } from './elements.js';
import { count, tiers } from './figures.js';
import { TIERS, TokenBar } from './token_bar.js';

const AGAIN_MS = [300, 3000]; // blocks go down to host and vault after the turn
const MOST = 6;

/** Of leading tokens in a tier or a faster one, what each tier adds. */
function added(held) {
  const more = {};
  let faster = 0;
  for (const tier of TIERS) {
    if ((held[tier] ?? 0) <= faster) continue;
    more[tier] = held[tier] - faster;
    faster = held[tier];
  }
  return more;
}

export class Holders {
  #session = null;
  #timers = [];

  constructor() {
    this.list = byId('holders-list');
    this.note = byId('holders-note');
    byId('holders-look').addEventListener('click', () => this.#look(this.#session));
  }

  /** `session`: null for none yet. */
  begin(session = null) {
    this.#timers.forEach(clearTimeout);
    this.#timers = [];
    this.#session = session;
    byId('holders').hidden = !session;
    if (session) return;
    this.list.replaceChildren();
    setText(this.note, '');
  }

  /** Soon, and once more later. */
  follow() {
    this.#timers.forEach(clearTimeout);
    const session = this.#session;
    if (session) this.#timers = AGAIN_MS.map((after) => setTimeout(() => this.#look(session), after));
  }

  async #look(session) {
    try {
      const answer = await ask(`sessions/${encodeURIComponent(session)}`);
      if (session === this.#session) this.#show(answer);
    } catch (error) {
      if (session !== this.#session) return;
      if (!(error instanceof Refused || error instanceof Away)) throw error;
      this.list.replaceChildren();
      const unknown = error.status === 404 ? 'not kept yet: the first turn has not ended' : error.message;
      setText(this.note, error instanceof Away ? 'the ingress does not answer' : unknown);
    }
  }

  #show({ tokens, workers, worker_id: last }) {
    const holders = Object.entries(workers).map(([worker, held]) => ({ worker, more: added(held) }));
    holders.sort((a, b) => (b.worker === last) - (a.worker === last) || a.worker.localeCompare(b.worker));
    const rows = holders.slice(0, MOST).map(({ worker, more }) => {
      const bar = new TokenBar();
      bar.show(more, tokens, { computes: false });
      const made = element('li');
      const who = element('span', worker, 'who');
      who.append(element('span', worker === last ? ' had the last turn' : ' peer', 'quiet'));
      made.append(who, bar.node, element('span', tiers(more) || 'nothing', 'quiet'));
      return made;
    });
    this.list.replaceChildren(...rows);
    const hidden = holders.length - rows.length;
    setText(this.note, `of ${count(tokens)} tokens${hidden > 0 ? `, and ${count(hidden)} further workers` : ''}`);
  }
}
