// Pure: what workers' counters grew by, and its sums over the last seconds. Time is handed in; no document.

const HIT_WINDOW_S = 60;
const TOKENS_WINDOW_S = 5;
const COUNTED = { prompt: 'prompt_tokens_total', hit: 'hit_tokens_total', generated: 'generated_tokens_total' };

/** What workers' counters grew by, sample by sample. A worker's new life counts from its second sample on. */
export class Rates {
  #before = new Map();
  #beforeAt = 0;
  #steps = [];

  /** `workers` as /workers has them, `at` in seconds. */
  add(workers, at) {
    const now = new Map();
    const grown = new Map();
    for (const [id, worker] of Object.entries(workers)) {
      const key = `${id}/${worker.epoch}`;
      const counters = Object.fromEntries(Object.entries(COUNTED).map(([name, field]) => [name, worker.load[field]]));
      now.set(key, counters);
      const was = this.#before.get(key);
      if (!was) continue;
      const more = Object.keys(COUNTED).map((name) => [name, Math.max(counters[name] - was[name], 0)]);
      grown.set(id, Object.fromEntries(more));
    }
    if (this.#before.size) this.#steps.push({ at, seconds: at - this.#beforeAt, grown });
    this.#before = now;
    this.#beforeAt = at;
    while (this.#steps.length && this.#steps[0].at <= at - HIT_WINDOW_S) this.#steps.shift();
  }

  /** Share of prompt tokens that were found in a cache within the last minute; null: nothing was asked. */
  hitRate(id) {
    const { prompt, hit } = this.#within(HIT_WINDOW_S, id);
    return prompt ? Math.min(hit / prompt, 1) : null;
  }

  /** Generated within the last seconds; null: not known yet. */
  tokensPerSecond(id) {
    const { generated, seconds: over } = this.#within(TOKENS_WINDOW_S, id);
    return over ? generated / over : null;
  }

  #within(window, id) {
    const total = { prompt: 0, hit: 0, generated: 0, seconds: 0 };
    for (const step of this.#steps) {
      if (step.at <= this.#beforeAt - window) continue;
      total.seconds += step.seconds;
      for (const [worker, more] of step.grown) {
        if (id !== undefined && worker !== id) continue;
        for (const name of Object.keys(COUNTED)) total[name] += more[name];
      }
    }
    return total;
  }
}
