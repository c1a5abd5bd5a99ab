// Pure: one turn of a conversation as it streams, and what is said of it. Time is handed in, in ms; no document.

import { count, milliseconds, rate } from './figures.js';

export class Turn {
  #began;
  #first = 0;
  #last = 0;
  #pieces = 0;
  #usage = null;
  #fleet = null;
  text = '';

  constructor(now) {
    this.#began = now;
  }

  /** An event of the stream. Whether it brought text. */
  hear(event, now) {
    const before = this.#pieces;
    this.#usage = event.usage ?? this.#usage;
    this.#fleet = event.kvfleet ?? this.#fleet;
    for (const choice of event.choices) {
      if (!choice.delta.content) continue;
      this.#last = now;
      this.#first ||= now;
      this.#pieces += 1;
      this.text += choice.delta.content;
    }
    return this.#pieces > before;
  }

  /** Where the prompt's tokens came from, once it is known: those cached by tier, and all of them. */
  get source() {
    const tiers = this.#fleet?.cached_by_tier;
    return this.#usage && tiers ? { tiers, total: this.#usage.prompt_tokens } : null;
  }

  /** What was reused, how soon it began, how fast it went. */
  about() {
    const parts = [];
    if (this.#usage) {
      const { prompt_tokens: prompt, completion_tokens: generated } = this.#usage;
      const cached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${count(cached)} of ${count(prompt)} prompt tokens cached`, `${count(generated)} generated`);
    }
    if (this.#first) parts.push(`TTFT ${milliseconds(this.#first - this.#began)}`);
    const generated = this.#usage?.completion_tokens ?? this.#pieces;
    const over = (this.#last - this.#first) / 1000; // what came all at once says nothing of the pace
    if (over > (this.#usage ? 0.02 : 0.25) && generated > 1) parts.push(`${rate((generated - 1) / over)} tokens/s`);
    if (this.#fleet?.worker_id) parts.push(this.#fleet.worker_id);
    return parts.join(' · ');
  }
}
