// The table of tiers: where KV blocks lie, and what came of them, over the whole fleet.

import { Row, arrange } from './elements.js';
import { NONE, bytes, count, share } from './figures.js';

const TIER_COLUMNS = [
  ['tier', 'id'], ['blocks', 'n'], ['held', 'n'], ['hits', 'n'], ['restored', 'n'], ['offloaded', 'n'],
  ['evicted', 'n'], ['failures', 'name'],
];

export class TiersTable {
  #rows = new Map();

  constructor(table) {
    this.body = table.tBodies[0];
  }

  fill({ load }) {
    const below = Object.entries(load.tiers);
    const brought = below.reduce((total, [, tier]) => total + tier.hit_tokens_total, 0);
    const lines = [
      [
        'device',
        `${count(load.blocks_used + load.blocks_cached)} / ${count(load.blocks_total)}`,
        share(load.blocks_total ? (load.blocks_used + load.blocks_cached) / load.blocks_total : null),
        count(Math.max(load.hit_tokens_total - brought, 0)),
        NONE, NONE, count(load.evictions_total), 'none',
      ],
    ];
    for (const [name, tier] of below) {
      const failures = Object.entries(tier.failures_total).filter(([, number]) => number);
      const size = tier.bytes_total ? `${bytes(tier.bytes_used)} / ${bytes(tier.bytes_total)}` : NONE;
      lines.push([
        name,
        tier.bytes_total ? count(tier.blocks) : NONE,
        size,
        count(tier.hit_tokens_total),
        tier.restores_total ? `${bytes(tier.restored_bytes_total)} in ${count(tier.restores_total)}` : '0',
        count(tier.offloaded_blocks_total),
        count(tier.evictions_total),
        failures.map(([why, number]) => `${why} ${count(number)}`).join(', ') || 'none',
      ]);
    }
    const wanted = lines.map((line) => {
      const row = this.#rows.get(line[0]) ?? new Row(TIER_COLUMNS);
      this.#rows.set(line[0], row);
      row.fill(line);
      return row.node;
    });
    arrange(this.body, wanted);
  }

  clear() {
    this.#rows.clear();
    this.body.replaceChildren();
  }
}
