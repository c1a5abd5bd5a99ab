// The page: builds its parts, reads the ingress for them in rounds, and knows what the key in use may see.
//
//   poll ──▶ dashboard ──▶ api: /stats, /workers, /v1/placements, /v1/timeline      one request at a time
//                 └─▶ rates ──▶ fleet, workers ──▶ drain; tiers; ledger; spans ──▶ timeline; header
//   chat ──▶ api: /v1/chat/completions, streamed ──▶ turn; /sessions ──▶ holders    by itself
//
// Computing is figures.js, rates.js, spans.js and turn.js; no import goes upward. What the server says reaches the page as text
// alone (textContent), never as markup.

import { Away, Refused, Session, ask } from './api.js';
import { Chat } from './chat.js';
import { byId, fillChoices } from './elements.js';
import { time } from './figures.js';
import { FirstStep, chatLine } from './first_step.js';
import { FleetLine } from './fleet.js';
import { Header } from './header.js';
import { Ledger } from './ledger.js';
import { Poller } from './poll.js';
import { Rates } from './rates.js';
import { TiersTable } from './tiers.js';
import { Timeline } from './timeline.js';
import { COMPUTED, TIERS, legend } from './token_bar.js';
import { WorkersTable } from './workers.js';

const PERIOD_MS = 1000;
const LOCKED_PERIOD_MS = 3000;
const LEDGER_LENGTH = 50;
const TIMELINE_LENGTH = 100;

const Access = { UNKNOWN: 'unknown', ADMIN: 'admin', TENANT: 'tenant', LOCKED: 'locked' };

class Page {
  #access = Access.UNKNOWN;
  #why = ''; // it is locked
  #awaySince = null;
  #rates = new Rates();
  #header = new Header((key) => this.#use(key));
  #line = new FleetLine(byId('fleet'));
  #workers = new WorkersTable(byId('workers'), byId('workers-note'));
  #tiers = new TiersTable(byId('tiers'));
  #timeline = new Timeline();
  #ledger = new Ledger(byId('ledger'), byId('ledger-note'));
  #firstStream = new FirstStep('timeline-first');
  #firstDecision = new FirstStep('ledger-first');
  #chat = new Chat();
  #poller = new Poller(() => this.#round());

  start() {
    this.#header.keys(Boolean(Session.key));
    for (const id of ['ledger-legend', 'chat-legend']) byId(id).append(legend([...TIERS, COMPUTED]));
    byId('ledger-model').addEventListener('change', () => {
      this.#ledger.clear();
      this.#poller.soon();
    });
    this.#poller.start();
  }

  #use(key) {
    Session.key = key;
    this.#access = Access.UNKNOWN;
    this.#why = '';
    this.#rates = new Rates();
    this.#timeline.clear();
    this.#ledger.clear();
    this.#header.keys(true);
    this.#poller.soon();
  }

  async #round() {
    const used = Session.key;
    try {
      await this.#read();
      this.#awaySince = null;
      document.body.classList.remove('away');
    } catch (error) {
      if (used === Session.key) this.#failed(error);
    }
    return this.#access === Access.LOCKED ? LOCKED_PERIOD_MS : PERIOD_MS;
  }

  /** Each in its turn. Raises what `ask` does. */
  async #read() {
    if (this.#access === Access.LOCKED) {
      this.#line.fillPublic(await ask('health'), null);
      this.#header.say(this.#why);
      return;
    }
    const stats = this.#access === Access.TENANT ? null : await this.#stats();
    if (this.#access === Access.LOCKED) {
      this.#line.fillPublic(await ask('health'), null);
      return;
    }
    const chosen = byId('ledger-model').value;
    if (stats) {
      const workers = await ask('workers');
      this.#rates.add(workers, performance.now() / 1000);
      this.#line.fill(stats, this.#rates);
      this.#workers.fill(workers, this.#rates);
      this.#tiers.fill(stats);
    }
    const models = stats ? stats.models : (await ask('v1/models')).data.map((one) => one.id);
    if (!stats) this.#line.fillPublic(await ask('health'), models);
    this.#chat.offer(models, { follows: Boolean(stats) });
    fillChoices(byId('ledger-model'), models, [['', 'all']]);
    this.#show(stats, models, await this.#decided(chosen, models[0] ?? 'MODEL'));
  }

  /** Ledger and timeline; or why they are not to be had, while the rest of the fleet is there. */
  async #decided(chosen, example) {
    try {
      const model = chosen ? `&model=${encodeURIComponent(chosen)}` : '';
      this.#ledger.fill((await ask(`v1/placements?limit=${LEDGER_LENGTH}${model}`)).placements);
      const timeline = await ask(`v1/timeline?limit=${TIMELINE_LENGTH}`);
      if (this.#timeline.fill(timeline)) this.#chat.follow();
      const line = chatLine(example);
      if (timeline.streams.length) this.#firstStream.hide();
      else this.#firstStream.show('No stream yet. Say something in the chat, or begin one from a terminal:', line);
      if (!this.#ledger.isEmpty) this.#firstDecision.hide();
      else this.#firstDecision.show('Each request is a decision of placement. This makes one:', chatLine(chosen || example));
      return '';
    } catch (error) {
      if (!(error instanceof Refused) || ![429, 503].includes(error.status)) throw error;
      return error.message;
    }
  }

  async #stats() {
    const key = Session.key;
    try {
      const stats = await ask('stats');
      this.#access = Access.ADMIN;
      return stats;
    } catch (error) {
      if (key !== Session.key || !(error instanceof Refused) || ![401, 403].includes(error.status)) throw error;
      if (error.status === 401) this.#lock(error);
      else {
        this.#access = Access.TENANT;
        this.#workers.clear(
          'Workers and tiers need an admin key. With this one: the chat, and streams and ledger of its own tenant.',
        );
        this.#tiers.clear();
      }
      return null;
    }
  }

  /** What was refused is not kept, and no more is asked with it. */
  #lock(error) {
    this.#access = Access.LOCKED;
    this.#why = Session.key ? `The key was refused: ${error.message}` : 'This ingress asks for an API key';
    Session.key = '';
    this.#workers.clear('Workers need an admin key.');
    this.#tiers.clear();
    this.#timeline.clear();
    this.#ledger.clear('needs a key');
    this.#firstDecision.hide();
    this.#chat.offer([]);
    this.#header.say(this.#why);
    this.#header.keys(true);
  }

  #show(stats, models, unplaced) {
    this.#header.keys(Boolean(Session.key));
    if (stats && !stats.ready) this.#header.say('No worker is ready');
    else if (unplaced) this.#header.say(`The ledger is not to be had: ${unplaced}`);
    else if (!models.length) this.#header.say('No model is served yet');
    else this.#header.say('Live', 'live');
  }

  #failed(error) {
    if (error instanceof Refused && error.status === 401) {
      this.#lock(error);
      return;
    }
    document.body.classList.add('away');
    this.#header.keys(true); // it may be the key's fault, or the ingress another's
    if (!(error instanceof Refused || error instanceof Away)) {
      console.error(error);
      this.#header.say(`This page has a fault: ${error}`, 'bad');
      return;
    }
    this.#awaySince ??= Date.now();
    const since = time(this.#awaySince);
    const why =
      error instanceof Refused
        ? `The ingress answers with an error since ${since}: ${error.message}`
        : `The ingress does not answer since ${since}; what is shown is of before. Trying again`;
    this.#header.say(why, 'bad');
  }
}

new Page().start();
