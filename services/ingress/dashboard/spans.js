// Pure: what the timeline draws, from what /v1/timeline says; places are shares of its width. No document, no clock.
//
//   placed ── queue ── started ── prefill ── first token ── decode ── ended ─┬─▶ the next stay: moved, or its worker lost
//                                                                           └─▶ done, or an error's code

const ENDS_WELL = ['done', 'moved', null];
const LIFE_AFTER = { joined: 'up', draining: 'draining', drained: 'gone', died: 'gone' };

/** The phases of one stay that lasted, `[name, begin, end]` in ms; what has not ended lasts until `now`. */
export function phasesOf(stay, now) {
  const { placed_unix_ms: placed, started_unix_ms: began, first_token_unix_ms: token, ended_unix_ms: ended } = stay;
  const last = ended ?? (stay.end ? token ?? began ?? placed : Math.max(now, placed));
  const first = Math.min(token ?? last, last);
  const started = Math.min(began ?? first, first);
  const phases = [['queue', placed, started], ['prefill', started, first], ['decode', first, last]];
  return phases.filter(([, begin, end]) => end > begin);
}

/** A stream's spans and marks, in ms. */
function courseOf(stream, now) {
  const spans = [];
  const marks = [];
  let before = null;
  for (const stay of stream.stays) {
    const phases = phasesOf(stay, now);
    if (before) {
      marks.push({ at: stay.placed_unix_ms, kind: before.end === 'moved' ? 'moved' : 'lost' });
      const left = spans.at(-1)?.end ?? before.placed_unix_ms;
      if (stay.placed_unix_ms > left) spans.push({ phase: 'wait', worker: '', begin: left, end: stay.placed_unix_ms });
    }
    for (const [phase, begin, end] of phases) spans.push({ phase, worker: stay.worker_id, begin, end });
    before = stay;
  }
  if (before.end === 'lost') marks.push({ at: spans.at(-1)?.end ?? before.placed_unix_ms, kind: 'lost' });
  else if (!ENDS_WELL.includes(before.end)) marks.push({ at: spans.at(-1)?.end ?? before.placed_unix_ms, kind: 'failed' });
  return { spans, marks };
}

/** By worker of which something is told: `[life, begin, end]` in ms, life being up, draining or gone. */
function livesOf(moments, now) {
  const lives = new Map();
  for (const { worker_id: worker, unix_ms: at, what } of moments) {
    const before = lives.get(worker) ?? [[what === 'joined' ? 'gone' : 'up', -Infinity, now]];
    before.at(-1)[2] = at;
    lives.set(worker, [...before, [LIFE_AFTER[what], at, now]]);
  }
  return lives;
}

/** What is seen between `from` and `to`, of at most so many streams and workers; `hidden`: streams that are not. */
export function drawn({ streams, workers: moments }, from, to, { mostStreams, mostWorkers }) {
  const place = (at) => Math.min(Math.max((at - from) / (to - from), 0), 1);
  const isSeen = (begin, end) => end >= from && begin <= to;
  const markOf = (mark) => ({ ...mark, at: place(mark.at) });
  const spanOf = (span) => ({ ...span, begin: place(span.begin), end: place(span.end) });
  const seen = [];
  for (const stream of streams) {
    const { spans, marks } = courseOf(stream, to);
    const within = spans.filter((span) => isSeen(span.begin, span.end)).map(spanOf);
    const marked = marks.filter(({ at }) => isSeen(at, at)).map(markOf);
    const workers = stream.stays.map((stay) => stay.worker_id);
    const last = stream.stays.at(-1);
    if (within.length || marked.length) {
      seen.push({ spans: within, marks: marked, workers, runs: last.end === null, tokens: last.output_tokens });
    }
  }
  const recent = moments.filter(({ unix_ms: at }) => isSeen(at, at));
  const lives = livesOf(moments, to);
  const named = [...new Set(recent.map((one) => one.worker_id).reverse())].slice(0, mostWorkers);
  return {
    streams: seen.slice(0, mostStreams),
    hidden: Math.max(seen.length - mostStreams, 0),
    workers: named.sort().map((worker) => ({
      worker,
      lives: lives.get(worker)
        .filter(([, begin, end]) => isSeen(begin, end))
        .map(([life, begin, end]) => ({ life, begin: place(begin), end: place(end) })),
      marks: recent.filter((one) => one.worker_id === worker).map(({ what, unix_ms: at }) => markOf({ at, kind: what })),
    })),
    lines: recent.filter(({ what }) => what === 'died' || what === 'drained').map(
      ({ what, unix_ms: at }) => markOf({ at, kind: what })),
  };
}
