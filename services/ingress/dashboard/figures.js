// Pure: how figures are written. No document, no clock, nothing kept.

export const NONE = '–';

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
export const tenth = new Intl.NumberFormat('en', {
  minimumFractionDigits: 1, maximumFractionDigits: 1, signDisplay: 'negative', // never -0.0
});

export const count = (value) => (value == null ? NONE : whole.format(value));
export const share = (value) => (value == null ? NONE : `${tenth.format(value * 100)}%`);
export const rate = (value) => (value == null ? NONE : (value < 10 ? tenth : whole).format(value));
export const time = (unixMs) => new Date(unixMs).toLocaleTimeString('en-GB');

export function milliseconds(value) {
  if (value == null) return NONE;
  return value < 1000 ? `${(value < 10 ? tenth : whole).format(value)} ms` : `${tenth.format(value / 1000)} s`;
}

export function seconds(value) {
  return value ? milliseconds(value * 1000) : NONE;
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? tenth.format(value) : value} ${['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}`;
}

export const sum = (values) => Object.values(values).reduce((total, one) => total + one, 0);

export function tiers(tokens) {
  const held = Object.entries(tokens).filter(([, number]) => number);
  return held.map(([tier, number]) => `${tier} ${count(number)}`).join(', ');
}
