// The stream of numbers: fetch with the key, read events, begin again when it breaks.

const KEY = "toque-key";
const RETRY_MS = [500, 1000, 2000, 4000];

export function storedKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function withKey(headers = {}) {
  const key = storedKey();
  return key ? { ...headers, authorization: "Bearer " + key } : headers;
}

/** Every `data:` of a server-sent stream, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const lines = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}

/**
 * Keeps the page fed while it is visible.
 * `on.document(object)`, `on.lost(reason)`, `on.denied(status, message)`.
 */
export class Feed {
  constructor(on) {
    this.on = on;
    this.tries = 0;
    this.abort = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.start()));
  }

  start() {
    clearTimeout(this.timer);
    if (this.abort) return;
    this.abort = new AbortController();
    this.read(this.abort).catch(() => {});
  }

  pause() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  restart() {
    this.pause();
    this.tries = 0;
    this.start();
  }

  async read(abort) {
    let reason = "the connection ended";
    try {
      const response = await fetch("/dashboard/events", { headers: withKey(), signal: abort.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        const body = await response.json();
        this.abort = null;
        this.on.denied(response.status, body.error.message);
        return;
      }
      if (!response.ok) throw new Error("the server answers " + response.status);
      for await (const text of events(response)) {
        this.tries = 0;
        this.on.document(JSON.parse(text));
      }
    } catch (error) {
      reason = error instanceof TypeError ? "the server does not answer" : error.message;
    }
    if (this.abort !== abort) return; // paused, or begun again
    this.abort = null;
    this.on.lost(reason);
    this.timer = setTimeout(() => this.start(), RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)]);
  }
}
