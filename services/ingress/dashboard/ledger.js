// The table of decisions: which are listed, and that it stands still while one is open.

import { arrange, setText } from './elements.js';
import { count } from './figures.js';
import { Entry, explained } from './ledger_entry.js';

/** An attempt alone is no name: asked twice, two replicas may both have decided it, or one of them two times. */
export class Ledger {
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
    const name = (one) =>
      JSON.stringify([one.tenant, one.request_id, one.attempt, one.placement_id, one.decided_unix_ms]);
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

  get isEmpty() {
    return !this.#entries.size;
  }

  #summary() {
    return this.isEmpty ? 'no decisions yet' : 'open an entry for its candidates and costs';
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
