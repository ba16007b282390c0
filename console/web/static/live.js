/** Keeps the page at the cluster's present: events say when, the server says what. */

import { drawFigures } from "./figures.js";
import { morph } from "./morph.js";
import { Stream } from "./stream.js";

const MIN_GAP_MS = 900;
const MIN_GAP_CHANGE_MS = 300;
const FRESH_SECONDS = 2;
const STALE_SECONDS = 10;
const ANNOUNCE_GAP_MS = 5_000;

let etag = "";
let inFlight = false;
let wanted = false;
let lastStart = 0;
/** When the shown page was rendered; everything's age counts from here. */
let rendered = performance.now();
/** @type {number | null} */
let retryAt = null;
/** The stream has ended, been cut or refused: nothing new can come until it is open again. */
let cut = false;
/** @type {number | undefined} */
let timer;

/** @param {number} gap */
function schedule(gap) {
  if (document.hidden) return;
  if (inFlight) {
    wanted = true;
    return;
  }
  const due = Math.max(0, lastStart + gap - performance.now());
  if (timer !== undefined && due > 0) return;
  clearTimeout(timer);
  timer = setTimeout(() => void refresh(), due);
}

/** A reader who selects text, or has a menu open, is left alone. */
function busyReading() {
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed) || document.activeElement?.tagName === "SELECT";
}

export async function refresh() {
  timer = undefined;
  if (inFlight) return;
  inFlight = true;
  lastStart = performance.now();
  try {
    /** @type {Record<string, string>} */
    const headers = { "X-Part": "body" };
    if (etag) headers["If-None-Match"] = etag;
    const reply = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(8_000) });
    if (reply.status === 304) rendered = performance.now();
    else if (reply.headers.has("X-Rendered")) await show(reply);
  } catch {
    /* No answer: the age grows and says so. */
  } finally {
    inFlight = false;
  }
  if (wanted) {
    wanted = false;
    schedule(MIN_GAP_MS);
  }
  drawAge();
}

/** @param {Response} reply */
async function show(reply) {
  const text = await reply.text();
  rendered = performance.now();
  if (busyReading()) return;
  etag = reply.headers.get("ETag") ?? "";
  const next = new DOMParser().parseFromString(text, "text/html");
  for (const id of ["top", "main"]) {
    const here = document.getElementById(id);
    const there = next.getElementById(id);
    if (here && there) morph(here, there);
  }
  document.title = next.title || document.title;
  if (document.querySelector("[data-held-for]:not([hidden])")) etag = "";
  document.dispatchEvent(new CustomEvent("perilune:shown", { detail: next }));
  announce();
  await drawFigures();
}

/** Header's age: the server's words while they are fresh, the count of seconds when they are not. */
function drawAge() {
  const mark = document.querySelector("#top .timemark");
  if (!(mark instanceof HTMLElement)) return;
  const silent = (performance.now() - rendered) / 1000;
  const age = silent + Number(mark.dataset.age ?? 0);
  const lost = silent >= FRESH_SECONDS && (cut || age >= STALE_SECONDS);
  document.body.classList.toggle("lost", lost);
  mark.classList.toggle("lost", lost);
  if (!lost) return;
  etag = "";
  const retry = retryAt === null ? 0 : Math.ceil((retryAt - performance.now()) / 1000);
  mark.textContent = `STALE ${Math.round(age)} s, ${retry > 0 ? `retry in ${retry} s` : "trying now"}`;
  const since = document.getElementById("since");
  if (since) since.textContent = new Date(Date.now() - age * 1000).toTimeString().slice(0, 8);
}

let announced = "";
let announcedAt = 0;

/** What needs attention, spoken when it changes, at most once in five seconds. */
function announce() {
  const text = document.getElementById("spoken")?.textContent?.trim() ?? "";
  const region = document.getElementById("announcer");
  if (!region || text === announced || performance.now() - announcedAt < ANNOUNCE_GAP_MS) return;
  announced = text;
  announcedAt = performance.now();
  region.textContent = text;
}

const stream = new Stream("/api/v1/events", {
  onEvent: (type) => schedule(type === "tick" ? MIN_GAP_MS : MIN_GAP_CHANGE_MS),
  onState: (open, at) => {
    retryAt = at;
    cut = !open;
    if (open) schedule(MIN_GAP_CHANGE_MS);
  },
});

function onVisibility() {
  if (document.hidden) stream.stop();
  else {
    stream.start();
    schedule(0);
  }
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("[data-held-for] button") : null;
  const holder = button?.closest("[data-held-for]");
  if (!(holder instanceof HTMLElement)) return;
  const body = document.getElementById(holder.dataset.heldFor ?? "");
  body?.setAttribute("data-released", "");
  body?.closest("section")?.scrollIntoView({ block: "start" });
  etag = "";
  schedule(0);
});

document.addEventListener("visibilitychange", onVisibility);
window.addEventListener("online", () => stream.hurry());
setInterval(drawAge, 500);
onVisibility();
announce();
void drawFigures();
if (document.documentElement.dataset.zoneChanged) void refresh();
