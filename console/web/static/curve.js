/** Draws the what-if curve and reads its points out. The server sends the finished figure. */

/** @typedef {{ traces: object[], layout: object, points: string[] }} Drawn */

const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true };
const lightScheme = matchMedia("(prefers-color-scheme: light)");
let etag = "";
let at = -1;
/** @type {Drawn | null} */
let drawn = null;

async function draw() {
  const box = document.querySelector(".plot[data-curve]");
  if (!(box instanceof HTMLElement)) return;
  const url = new URL(box.dataset.curve ?? "", location.href);
  url.searchParams.set("theme", lightScheme.matches ? "light" : "dark");
  /** @type {Record<string, string>} */
  const headers = etag && drawn ? { "If-None-Match": etag } : {};
  let reply;
  try {
    reply = await fetch(url, { headers, cache: "no-store", signal: AbortSignal.timeout(8_000) });
  } catch {
    return;
  }
  if (!reply.ok) return;
  etag = reply.headers.get("ETag") ?? "";
  drawn = await reply.json();
  if (!drawn) return;
  // @ts-ignore Plotly is a global of the vendored script
  await Plotly.react(box, drawn.traces, drawn.layout, CONFIG);
  listen(box);
  if (at >= 0 && document.activeElement === box) readOut(box);
}

/** @param {HTMLElement} box */
function readOut(box) {
  const line = box.closest("figure")?.querySelector(".readout");
  if (line && drawn) line.textContent = drawn.points[at] ?? "";
}

/** @param {HTMLElement} box */
function listen(box) {
  if (box.dataset.listens) return;
  box.dataset.listens = "yes";
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -99, End: 99 }[event.key];
    if (step === undefined || !drawn || event.altKey || event.ctrlKey || event.metaKey) return;
    at = Math.min(drawn.points.length - 1, Math.max(0, at + step));
    readOut(box);
    event.preventDefault();
    event.stopPropagation();
  });
  // @ts-ignore Plotly's own event emitter
  box.on("plotly_hover", ({ points: [point] }) => {
    const line = box.closest("figure")?.querySelector(".readout");
    if (line) line.textContent = point.hovertext ?? "";
  });
}

document.addEventListener("perilune:shown", () => void draw());
lightScheme.addEventListener("change", () => {
  etag = "";
  void draw();
});
void draw();
