/**
 * Draws the heatmaps of the page with plotly.js. The server sends finished figures; this keeps
 * them current, walks their cells by keyboard and reads the chosen one out.
 */

/**
 * @typedef {{ key: string, label: string, href: string }} RowHead
 * @typedef {{ z: (number | null)[][], hovertext: string[][], x: number[] }} Trace
 * @typedef {{ closed_key: string, traces: Trace[], layout: { shapes: object[] }, rows: RowHead[] }} Drawn
 * @typedef {{ drawn: Drawn | null, etag: string, row: number, column: number, shown: boolean }} Held
 */

/** @type {WeakMap<HTMLElement, Held>} */
const held = new WeakMap();
const lightScheme = matchMedia("(prefers-color-scheme: light)");
const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true, doubleClick: "reset" };

/** Bring every visible figure up to date. Hidden ones (a closed sheet on a phone) cost nothing. */
export async function drawFigures() {
  const boxes = [...document.querySelectorAll(".plot[data-figure]")];
  await Promise.all(boxes.map((box) => (box instanceof HTMLElement ? draw(box) : null)));
}

/** @param {HTMLElement} box @returns {Held} */
function stateOf(box) {
  let state = held.get(box);
  if (!state) {
    state = { drawn: null, etag: "", row: 0, column: -1, shown: false };
    held.set(box, state);
    listen(box, state);
  }
  return state;
}

/** @param {HTMLElement} box */
async function draw(box) {
  if (box.offsetParent === null) return;
  const state = stateOf(box);
  const url = new URL(box.dataset.figure ?? "", location.href);
  url.searchParams.set("theme", lightScheme.matches ? "light" : "dark");
  if (state.drawn) url.searchParams.set("have", state.drawn.closed_key);
  /** @type {Record<string, string>} */
  const headers = state.etag ? { "If-None-Match": state.etag } : {};
  let reply;
  try {
    reply = await fetch(url, { headers, cache: "no-store", signal: AbortSignal.timeout(8_000) });
  } catch {
    return;
  }
  if (!reply.ok) return;
  state.etag = reply.headers.get("ETag") ?? "";
  const body = await reply.json();
  if (body.open && state.drawn) state.drawn.traces[1] = body.open;
  else state.drawn = body;
  if (state.drawn) await paint(box, state, state.drawn);
}

/** @param {HTMLElement} box @param {Held} state @param {Drawn} drawn */
async function paint(box, state, drawn) {
  const traces = drawn.traces.map((trace) => ({ ...trace }));
  const layout = { ...drawn.layout, shapes: [...drawn.layout.shapes, ...cursorShapes(state, drawn)] };
  // @ts-ignore Plotly is a global of the vendored script
  await Plotly.react(box, traces, layout, CONFIG);
  if (!state.shown) {
    state.shown = true;
    listenToPlot(box, state);
  }
  if (state.column >= 0 && document.activeElement === box) readOut(box, state);
}

/** Cells of one row over both traces. @param {Drawn} drawn @param {number} row */
function textsOf(drawn, row) {
  return drawn.traces.flatMap((trace) => trace.hovertext[row] ?? []);
}

/** Edges of all columns. @param {Drawn} drawn */
function edgesOf(drawn) {
  return drawn.traces.flatMap((trace, place) => (place === 0 ? trace.x : trace.x.slice(1)));
}

/** @param {Held} state @param {Drawn} drawn */
function cursorShapes(state, drawn) {
  const edges = edgesOf(drawn);
  if (state.column < 0 || state.column + 1 >= edges.length) return [];
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--focus").trim();
  return [{
    type: "rect", xref: "x", yref: "y", layer: "above",
    x0: edges[state.column], x1: edges[state.column + 1], y0: state.row - 0.5, y1: state.row + 0.5,
    line: { color: colour, width: 3 }, fillcolor: "rgba(0,0,0,0)",
  }];
}

/** @param {HTMLElement} box @param {Held} state */
function readOut(box, state) {
  const drawn = state.drawn;
  const line = box.closest("figure")?.querySelector(".readout");
  if (!drawn || !line) return;
  const text = textsOf(drawn, state.row)[state.column] ?? "";
  const href = hrefOf(box, state);
  line.textContent = href ? `${text}   Enter opens ${decodeURIComponent(href)}` : text;
}

/** A pair's page for a matrix, else the row's. @param {HTMLElement} box @param {Held} state */
function hrefOf(box, state) {
  const drawn = state.drawn;
  const row = drawn?.rows[state.row];
  if (!drawn || !row) return "";
  const columns = JSON.parse(box.dataset.columns ?? "null");
  if (!columns) return row.href;
  const column = columns[state.column];
  return `/transfers/${encodeURIComponent(row.key)}/${encodeURIComponent(column)}`;
}

/** @param {HTMLElement} box @param {Held} state */
function listen(box, state) {
  box.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !state.drawn) return;
    const last = edgesOf(state.drawn).length - 2;
    const rows = state.drawn.rows.length - 1;
    /** @type {Record<string, [number, number]>} */
    const moves = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -last - 1], End: [0, last + 1], PageUp: [-10, 0], PageDown: [10, 0],
    };
    if (event.key === "Enter" && state.column >= 0) {
      const href = hrefOf(box, state);
      if (href) location.assign(href);
    } else if (event.key in moves) {
      const [down, right] = moves[event.key];
      state.row = clamp(state.row + down, 0, rows);
      state.column = clamp((state.column < 0 ? last : state.column) + right, 0, last);
      void paint(box, state, state.drawn);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  box.addEventListener("focus", () => {
    if (!state.drawn) return;
    if (state.column < 0) state.column = edgesOf(state.drawn).length - 2;
    void paint(box, state, state.drawn);
  });
}

/** @param {HTMLElement} box @param {Held} state */
function listenToPlot(box, state) {
  /** @param {{ points: { curveNumber: number, pointNumber: [number, number] }[] }} event */
  const choose = ({ points: [point] }) => {
    const before = point.curveNumber === 1 && state.drawn ? state.drawn.traces[0].x.length - 1 : 0;
    state.row = point.pointNumber[0];
    state.column = point.pointNumber[1] + before;
  };
  // @ts-ignore Plotly's own event emitter
  box.on("plotly_hover", (event) => {
    if (document.activeElement === box) return;
    choose(event);
    readOut(box, state);
    state.column = -1;
  });
  // @ts-ignore Plotly's own event emitter
  box.on("plotly_click", (event) => {
    choose(event);
    const href = hrefOf(box, state);
    if (href) location.assign(href);
  });
}

/** @param {number} value @param {number} low @param {number} high */
function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

lightScheme.addEventListener("change", () => {
  for (const box of document.querySelectorAll(".plot[data-figure]")) {
    const state = box instanceof HTMLElement ? held.get(box) : undefined;
    if (state) {
      state.drawn = null;
      state.etag = "";
    }
  }
  void drawFigures();
});

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest(".showfigure") : null;
  if (!button) return;
  const shown = button.closest("figure")?.toggleAttribute("data-shown") ?? false;
  button.setAttribute("aria-expanded", String(shown));
  void drawFigures();
});
