// What to do where there is nothing to see yet: words, and a line for a shell that can be copied.

import { Session, addressOf } from './api.js';
import { byId, element, setText } from './elements.js';

/** One word of a shell. */
const word = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The curl line of a chat. */
export function chatLine(model) {
  const body = { model, stream: true, messages: [{ role: 'user', content: 'Who goes there?' }] };
  const address = word(addressOf('v1/chat/completions'));
  return `curl -N ${address} -H 'content-type: application/json'${Session.curlFlag} -d ${word(JSON.stringify(body))}`;
}

export const readyLine = () => `curl -s ${word(addressOf('readyz'))}`;

/** Shown until `hide`. */
export class FirstStep {
  constructor(id) {
    this.node = byId(id);
    this.words = element('p');
    this.code = element('code');
    this.code.tabIndex = 0;
    this.button = element('button', 'Copy');
    this.button.type = 'button';
    this.button.addEventListener('click', () => this.#copy());
    const line = element('div', null, 'command');
    line.append(this.code, this.button);
    this.node.append(this.words, line);
  }

  show(words, line) {
    setText(this.words, words);
    setText(this.code, line);
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }

  /** Browsers keep the clipboard from pages that came over http from elsewhere: there the line is marked. */
  async #copy() {
    getSelection().selectAllChildren(this.code);
    let said = 'Marked: copy it';
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      said = 'Copied';
    } catch {
      // the mark is left
    }
    setText(this.button, said);
    setTimeout(() => setText(this.button, 'Copy'), 2000);
  }
}
