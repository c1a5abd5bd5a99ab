// The question before a worker drains, and the order itself.

import { Away, Refused, order } from './api.js';
import { byId, setText } from './elements.js';
import { count } from './figures.js';

export class DrainDialog {
  #worker = '';

  constructor() {
    this.dialog = byId('drain-dialog');
    this.yes = byId('drain-yes');
    byId('drain-no').addEventListener('click', () => this.dialog.close());
    this.yes.addEventListener('click', () => this.#drain());
  }

  /** `workers` as /workers has them. */
  ask(id, workers) {
    const { model, load } = workers[id];
    const others = Object.entries(workers).filter(([other, one]) => other !== id && one.state === 'ready');
    const staying = others.filter(([, one]) => one.model === model).length;
    this.#worker = id;
    setText(byId('drain-title'), `Drain ${id}?`);
    setText(
      byId('drain-what'),
      `It takes nothing new, hands over its ${count(load.running)} running and ${count(load.waiting)} waiting ` +
        `streams, and ends. ${count(staying)} other ready ${staying === 1 ? 'worker serves' : 'workers serve'} ${model}.`,
    );
    setText(
      byId('drain-last'),
      staying ? '' : `It is the last ready worker of ${model}: its streams wait until another one is ready. ` +
        'kvfleet up ends with its last worker.',
    );
    setText(byId('drain-problem'), '');
    setText(this.yes, `Drain ${id}`);
    this.yes.disabled = false;
    this.dialog.showModal();
  }

  async #drain() {
    this.yes.disabled = true;
    try {
      await order(`workers/${encodeURIComponent(this.#worker)}/drain`);
      this.dialog.close();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Away)) throw error;
      setText(byId('drain-problem'), error instanceof Away ? 'The ingress does not answer.' : error.message);
      this.yes.disabled = false;
    }
  }
}
