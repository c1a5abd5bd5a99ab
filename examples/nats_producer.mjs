// A bare producer in Node: one prompt over NATS as JSON, its tokens as they come. It needs the npm package `nats`.
//
//   npm install --no-save nats
//   node nats_producer.mjs "JULIET: O Romeo," --nats nats://127.0.0.1:4222
//
// A worker that drains hands the request over: frames then have a higher `attempt`, and late ones of the older attempt
// are dropped. After lost frames, silence or a retryable failure the request is sent again under its id. The fleet draws
// the same tokens for the same id, and `index` says which of them are shown already (docs/streams.md).

import { randomUUID } from 'node:crypto';
import { parseArgs } from 'node:util';
import { connect, createInbox, headers } from 'nats';

const SILENCE_MS = 30_000;
const TRIES = 8;

const { values: said, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    nats: { type: 'string', default: 'nats://127.0.0.1:4222' },
    tenant: { type: 'string', default: 'public' },
    model: { type: 'string', default: 'demo' },
    'max-tokens': { type: 'string', default: '60' },
  },
});
const id = randomUUID().replaceAll('-', '');
const request = { request: id, prompt: positionals[0], max_tokens: Number(said['max-tokens']), temperature: 0.8 };
let shown = 0; // tokens, over all tries

/** Sends the request once. Returns why it has to be sent again, or ''. Throws for a request that is refused. */
async function ask(nc) {
  const inbox = createInbox(`_prd.${said.tenant}.${id}`); // one per try: what comes late for an earlier try is not read
  const asJson = headers();
  asJson.set('Content-Type', 'application/json');
  const frames = nc.subscribe(inbox);
  nc.publish(`kvf.generate.${said.tenant}.${said.model}`, JSON.stringify(request), { reply: inbox, headers: asJson });
  const silence = setTimeout(() => frames.unsubscribe(), SILENCE_MS);
  let newest = 0;
  try {
    for await (const message of frames) {
      silence.refresh();
      if (!message.data.length) return 'no placement is there'; // NATS says that nobody subscribes to the subject
      const frame = message.json();
      if (frame.attempt < newest) continue;
      newest = frame.attempt;
      if (frame.type === 'failed') {
        const reason = `${frame.code}: ${frame.message}`;
        if (frame.retryable) return reason;
        throw new Error(reason);
      }
      if (frame.index > shown || frame.output_tokens > shown) return 'frames were lost';
      if (frame.type === 'finished') return '';
      if (frame.type !== 'tokens') continue;
      const text = frame.text.slice(shown - frame.index);
      shown += text.length;
      process.stdout.write(text.join(''));
    }
    return 'silence';
  } finally {
    clearTimeout(silence);
    frames.unsubscribe();
  }
}

const nc = await connect({ servers: said.nats, maxReconnectAttempts: -1 });
try {
  let reason = await ask(nc);
  for (let tries = 1; reason && tries < TRIES; tries += 1) {
    console.error(`\n[${reason}; asking again]`);
    await new Promise((resolve) => setTimeout(resolve, 1000));
    reason = await ask(nc);
  }
  if (reason) throw new Error(`given up after ${TRIES} tries: ${reason}`);
  console.log();
} catch (error) {
  console.error(`\n${error.message}`);
  process.exitCode = 1;
} finally {
  await nc.close();
}
