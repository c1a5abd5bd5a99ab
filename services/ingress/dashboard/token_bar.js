// Where the tokens of a prompt came from, as a bar of colours; what it shows stands in words beside it.

import { element } from './elements.js';
import { sum } from './figures.js';

export const TIERS = ['device', 'host', 'vault', 'peer'];
export const COMPUTED = 'computed';

export class TokenBar {
  #parts = new Map();

  constructor() {
    this.node = element('span', null, 'tokens-bar');
    this.node.setAttribute('aria-hidden', 'true');
    for (const name of [...TIERS, COMPUTED]) {
      const part = element('span', null, `part ${name}`);
      this.#parts.set(name, part);
      this.node.append(part);
    }
  }

  /** `tokens` by tier, of `total`; the rest was `computed`, or nobody has it. */
  show(tokens, total, { computes = true } = {}) {
    const rest = Math.max(total - sum(tokens), 0);
    for (const [name, part] of this.#parts) {
      const number = name === COMPUTED ? (computes ? rest : 0) : tokens[name] ?? 0;
      part.style.width = total ? `${(100 * number) / total}%` : '0';
      part.hidden = !number;
    }
  }
}

/** What colours mean, or glyphs. */
export function legend(names, glyphs = {}) {
  const list = element('span', null, 'legend');
  for (const name of names) {
    const entry = element('span', null, 'entry');
    entry.append(element('span', glyphs[name] ?? '', `${glyphs[name] ? 'glyph' : 'part'} ${name}`), name);
    list.append(entry);
  }
  return list;
}
