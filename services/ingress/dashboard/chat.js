// The conversation with a model: its turns so far, the one that streams, and what stops it.

import { Refused, stream } from './api.js';
import { byId, element, fillChoices } from './elements.js';
import { count, sum, tiers } from './figures.js';
import { Holders } from './holders.js';
import { COMPUTED, TokenBar } from './token_bar.js';
import { Turn } from './turn.js';

const DRAW_MS = 50;

/** By which the fleet knows the conversation, so that one can ask where its blocks are. */
const newSession = () => `page-${[...crypto.getRandomValues(new Uint8Array(16))].map((one) => one.toString(16)).join('')}`;

export class Chat {
  #messages = [];
  #running = null; // the AbortController of the turn that streams
  #session = newSession();
  #holders = new Holders();
  #follows = false; // looks by itself who holds the blocks

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

  /** `follows`: each look at who holds the blocks is a request, which costs the key in use nothing. */
  offer(models, { follows = false } = {}) {
    fillChoices(this.model, models);
    this.#follows = follows;
  }

  /** A worker came or went: blocks may be elsewhere. */
  follow() {
    if (this.#follows && !this.#running) this.#holders.follow();
  }

  #begin() {
    this.#running?.abort();
    this.#messages = [];
    this.#session = newSession();
    this.#holders.begin();
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
    const source = element('p', null, 'source');
    source.hidden = true;
    turn.append(element('p', who === 'user' ? 'you' : this.model.value, 'who'), body, source, about);
    this.turns.append(turn);
    this.#scroll(true);
    return { turn, text: shown, source, about, timer: 0 };
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
    const turn = new Turn(performance.now());
    try {
      await this.#stream([...conversation, { role: 'user', content: said }], turn, shown, controller.signal);
      this.#draw(turn, shown);
    } catch (error) {
      this.#draw(turn, shown);
      if (controller.signal.aborted) {
        shown.about.textContent = `stopped · ${turn.about()}`;
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
    if (conversation === this.#messages && conversation.length) {
      this.#holders.begin(this.#session);
      this.follow();
    }
    this.#scroll(false);
  }

  async #stream(messages, turn, shown, signal) {
    const limit = Number.parseInt(byId('chat-max').value, 10);
    const body = {
      model: this.model.value,
      messages,
      seq_id: this.#session,
      stream: true,
      stream_options: { include_usage: true },
      ...(limit > 0 ? { max_tokens: limit } : {}),
    };
    for await (const event of stream('v1/chat/completions', body, signal)) {
      if (turn.hear(event, performance.now())) shown.timer ||= setTimeout(() => this.#draw(turn, shown), DRAW_MS);
    }
  }

  /** Not with each token: a fast model would keep the page too busy to hear a click. */
  #draw(turn, shown) {
    clearTimeout(shown.timer);
    shown.timer = 0;
    shown.text.appendData(turn.text.slice(shown.text.length));
    shown.about.textContent = turn.about();
    if (turn.source && shown.source.hidden) {
      const { tiers: cached, total } = turn.source;
      const bar = new TokenBar();
      bar.show(cached, total);
      const computed = Math.max(total - sum(cached), 0);
      shown.source.append(bar.node, [tiers(cached), `${COMPUTED} ${count(computed)}`].filter(Boolean).join(', '));
      shown.source.hidden = false;
    }
    this.#scroll(false);
  }
}
