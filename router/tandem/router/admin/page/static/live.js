// The stream of what has changed, for as long as the page is open. EventSource cannot send the key, so this reads it itself.

import { isRefused, open } from "./session.js";

const SILENT_MS = 10_000; // the router says something every half second, of a large cluster every few
const RETRY_MS = [500, 1000, 2000, 4000];

// Calls tell(section, value) for news, beat() after each piece, and connection(isLive, why) when that changes.
// Ends, with the error, when the key is refused or `signal` aborts.
export async function follow({ tell, beat, connection, signal }) {
  for (let tries = 0; ; tries += 1) {
    let why = "the router ended the stream";
    try {
      await readOnce(tell, () => {
        tries = -1;
        connection(true, "");
        beat();
      }, signal);
      if (tries === -1) continue; // streams end from time to time
    } catch (error) {
      if (signal.aborted || isRefused(error)) throw error;
      why = error.name === "AbortError" ? "the router sends nothing" : error.message;
    }
    connection(false, why);
    await pause(RETRY_MS[Math.min(Math.max(tries, 0), RETRY_MS.length - 1)], signal);
  }
}

async function readOnce(tell, onPiece, signal) {
  const silence = new AbortController();
  const stop = () => silence.abort();
  signal.addEventListener("abort", stop);
  let timer = setTimeout(stop, SILENT_MS);
  try {
    const response = await open("live", { signal: silence.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(stop, SILENT_MS);
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) dispatch(frame, tell);
      if (frames.length > 0) onPiece();
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    silence.abort();
  }
}

function dispatch(frame, tell) {
  let name = "";
  let data = "";
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name) tell(name, JSON.parse(data));
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
  });
}
