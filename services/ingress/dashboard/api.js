// What the page asks of the ingress, the key it asks with, and what can come instead of an answer. It shows nothing.
//
// The key lives in this tab's sessionStorage and in the Authorization header, nowhere else.

const BASE = new URL('..', import.meta.url);
const TIMEOUT_MS = 5000;
const KEY = 'kvfleet-api-key';

/** For a shell. */
export const addressOf = (path) => new URL(path, BASE).href;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Whether a header can carry it: with another `fetch` sends nothing, which looks as if nobody answered. */
export const isKey = (text) => /^[\x20-\x7e]+$/.test(text);

export const Session = {
  get key() {
    const kept = sessionStorage.getItem(KEY) ?? '';
    if (!kept || isKey(kept)) return kept;
    sessionStorage.removeItem(KEY);
    return '';
  },
  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  /** As curl is to send it: the key is named, never shown. */
  get curlFlag() {
    return this.key ? ' -H "authorization: Bearer $KVFLEET_API_KEY"' : '';
  },
  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  },
};

export class Away extends Error {}

/** As the API says it, whatever came. */
async function errorOf(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no body of the API's: something between here and it answered
  }
  return new Refused(response.status, message);
}

/** Raises Refused for what the API refuses, Away where nothing answers in time. */
export async function ask(path, more = {}) {
  const asked = { headers: Session.headers(), signal: AbortSignal.timeout(TIMEOUT_MS), cache: 'no-store', ...more };
  try {
    const response = await fetch(new URL(path, BASE), asked);
    if (!response.ok && !(path === 'health' && response.status === 503)) throw await errorOf(response);
    return await response.json();
  } catch (error) {
    throw error instanceof Refused ? error : new Away(String(error));
  }
}

/** Has something done. Raises what `ask` does. */
export const order = (path) =>
  ask(path, { method: 'POST', headers: { 'content-type': 'application/json', ...Session.headers() }, body: '{}' });

/** The JSON of each `data:` line, until `[DONE]`. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

/** The events of a streamed answer. Raises Refused before or amid them, and what `fetch` raises. */
export async function* stream(path, body, signal) {
  const response = await fetch(new URL(path, BASE), {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...Session.headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Refused(response.status, event.error.message);
    yield event;
  }
}
