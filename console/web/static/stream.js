/**
 * The event stream over fetch: it sends Last-Event-ID on every reconnect, which a new EventSource
 * cannot, and says when the next try is. Only ids and types are read; pages come from the server.
 */

const FIRST_DELAY_MS = 500;
const LAST_DELAY_MS = 10_000;
const SILENCE_MS = 12_000;

/**
 * @typedef {{
 *   onEvent: (type: string) => void,
 *   onState: (open: boolean, retryAt: number | null) => void,
 * }} Listener
 */

export class Stream {
  /** @param {string} url @param {Listener} listener */
  constructor(url, listener) {
    this.url = url;
    this.listener = listener;
    this.lastId = "";
    this.delay = FIRST_DELAY_MS;
    this.stopped = true;
    /** @type {AbortController | null} */
    this.abort = null;
    /** @type {number | undefined} */
    this.timer = undefined;
  }

  start() {
    if (!this.stopped) return;
    this.stopped = false;
    void this.#run();
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    this.abort?.abort();
  }

  /** Try now instead of waiting. */
  hurry() {
    if (this.stopped) return;
    this.delay = FIRST_DELAY_MS;
    if (this.timer === undefined) return;
    clearTimeout(this.timer);
    this.timer = undefined;
    void this.#run();
  }

  async #run() {
    this.timer = undefined;
    const abort = new AbortController();
    this.abort = abort;
    try {
      await this.#read(abort);
    } catch {
      /* Refused, cut or silent: the reconnect below is the answer to all of them. */
    }
    if (this.stopped || this.abort !== abort) return;
    const wait = this.delay * (0.75 + Math.random() / 2);
    this.delay = Math.min(LAST_DELAY_MS, this.delay * 2);
    this.listener.onState(false, performance.now() + wait);
    this.timer = setTimeout(() => void this.#run(), wait);
  }

  /** @param {AbortController} abort */
  async #read(abort) {
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    /** @type {Record<string, string>} */
    const headers = { Accept: "text/event-stream" };
    if (this.lastId) headers["Last-Event-ID"] = this.lastId;
    try {
      const reply = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store" });
      if (!reply.ok || !reply.body) throw new Error(`events: ${reply.status}`);
      this.delay = FIRST_DELAY_MS;
      this.listener.onState(true, null);
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      const parse = this.#parser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
        parse(value);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  #parser() {
    let rest = "";
    let type = "message";
    /** @param {string} text */
    return (text) => {
      const lines = (rest + text).split(/\r\n|\n|\r/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("id:")) this.lastId = line.slice(3).trim();
        else if (line.startsWith("event:")) type = line.slice(6).trim();
        else if (line === "") {
          if (type !== "message") this.listener.onEvent(type);
          type = "message";
        }
      }
    };
  }
}
