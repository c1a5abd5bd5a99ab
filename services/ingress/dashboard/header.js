// The top of the page: the line that says how things stand, and the form for a key. What a key opens is not its affair.

import { Session, isKey } from './api.js';
import { byId, setText } from './elements.js';

export class Header {
  /** `onKey`: what is to be done with the key typed in; with '', it is forgotten. */
  constructor(onKey) {
    byId('key-form').addEventListener('submit', (event) => {
      event.preventDefault();
      const typed = byId('key').value.trim();
      byId('key').value = '';
      const wrong = typed && !isKey(typed);
      this.#complain(wrong ? 'Not used: a key has printable ASCII characters alone' : '');
      if (!wrong) onKey(typed);
    });
    byId('key-forget').addEventListener('click', () => {
      this.#complain('');
      onKey('');
    });
  }

  /** About what was typed; until something else is. */
  #complain(text) {
    setText(byId('key-problem'), text);
  }

  /** Said aloud only when it changes. */
  say(text, kind = 'warn') {
    setText(byId('status'), text);
    byId('status').dataset.kind = kind;
  }

  /** Whether a key is asked for, and whether one is in use. */
  keys(asked) {
    byId('key-form').hidden = !asked;
    byId('key-forget').hidden = !Session.key;
    byId('key').placeholder = Session.key ? 'one is in use' : '';
  }
}
