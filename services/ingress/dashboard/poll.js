// When the page asks: once a period, one round at a time, seldom while nobody looks. What is asked is not its affair.

const HIDDEN_PERIOD_MS = 15000;

export class Poller {
  #round;
  #timer = 0;
  #running = false;
  #again = false;

  /** `round`: asks and shows; gives how long until the next, in ms. */
  constructor(round) {
    this.#round = round;
  }

  start() {
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.soon();
    });
    this.#run();
  }

  /** Now, or as soon as what is under way has ended. */
  soon() {
    this.#again = this.#running;
    if (!this.#running) {
      clearTimeout(this.#timer);
      this.#run();
    }
  }

  async #run() {
    this.#running = true;
    let period = await this.#round();
    this.#running = false;
    if (document.hidden) period = HIDDEN_PERIOD_MS;
    if (this.#again) period = 0;
    this.#again = false;
    this.#timer = setTimeout(() => this.#run(), period);
  }
}
