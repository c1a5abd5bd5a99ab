// The line of sums on top, and each one's last minute as a sparkline.

import { element } from './elements.js';
import { NONE, count, milliseconds, rate, share } from './figures.js';

const POINTS = 60;
const SVG = 'http://www.w3.org/2000/svg';

function sparkline() {
  const picture = document.createElementNS(SVG, 'svg');
  picture.setAttribute('viewBox', `0 0 ${POINTS - 1} 20`);
  picture.setAttribute('preserveAspectRatio', 'none');
  picture.setAttribute('aria-hidden', 'true');
  const line = document.createElementNS(SVG, 'polyline');
  picture.append(line);
  return [picture, line];
}

/** From the right; a point that is not known is left out. `top`: what fills the height at least. */
function points(values, top) {
  const highest = Math.max(top, ...values.map((value) => value ?? 0));
  const first = POINTS - values.length;
  return values
    .map((value, at) => (value == null ? '' : `${first + at},${(19 - (18 * value) / highest).toFixed(1)}`))
    .filter(Boolean)
    .join(' ');
}

/** The line of sums, each with its last minute. */
export class FleetLine {
  #tiles = new Map();

  constructor(list) {
    for (const [name, label, top] of [
      ['workers', 'workers ready', 1],
      ['placements', 'placements', 1],
      ['vaults', 'vaults', 1],
      ['models', 'models', 1],
      ['running', 'streams running', 1],
      ['queued', 'queued', 1],
      ['tokens', 'tokens/s', 1],
      ['hits', 'hit rate, last minute (all)', 1],
      ['saved', 'restoring saved in pauses', 1],
    ]) {
      const tile = element('div');
      const value = element('dd', NONE);
      const more = element('span', '', 'quiet');
      const [picture, line] = sparkline();
      tile.append(element('dt', label), value, picture);
      list.append(tile);
      this.#tiles.set(name, { value, more, line, top, values: [] });
    }
  }

  show(name, number, text, about = '') {
    const tile = this.#tiles.get(name);
    tile.value.textContent = text;
    tile.more.textContent = about;
    if (about) tile.value.append(' ', tile.more);
    tile.value.title = name === 'models' ? about : '';
    tile.values.push(number);
    if (tile.values.length > POINTS) tile.values.shift();
    tile.line.setAttribute('points', points(tile.values, tile.top));
  }

  fill(stats, rates) {
    const tokens = rates.tokensPerSecond();
    const hits = rates.hitRate();
    this.show('workers', stats.ready, count(stats.ready), `of ${count(stats.workers)}`);
    this.show('placements', stats.placements, count(stats.placements));
    this.show('vaults', stats.vaults, count(stats.vaults));
    this.show('models', stats.models.length, count(stats.models.length), stats.models.join(', '));
    this.show('running', stats.load.running, count(stats.load.running));
    this.show('queued', stats.load.waiting, count(stats.load.waiting));
    this.show('tokens', tokens, rate(tokens));
    this.show('hits', hits, share(hits), `(${share(stats.hit_rate)})`);
    const saved = stats.load.saved_s_total;
    this.show('saved', saved, milliseconds(1000 * saved), `${count(stats.load.paused)} paused`);
  }

  /** What everybody may know. */
  fillPublic(health, models) {
    this.show('workers', health.workers_ready, count(health.workers_ready));
    this.show('placements', health.placements, count(health.placements));
    this.show('vaults', health.vaults, count(health.vaults));
    if (models) this.show('models', models.length, count(models.length), models.join(', '));
    else this.show('models', null, NONE);
    for (const name of ['running', 'queued', 'tokens', 'hits', 'saved']) this.show(name, null, NONE);
  }
}
