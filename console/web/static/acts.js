/**
 * Acts on the cache, on jobs, on running requests and of the doctor: the server says what one would do, the operator agrees (and types
 * the name of what cannot be undone), then one request. The token is the policy form's: it lives in
 * this tab's session storage and goes nowhere but into the Authorization header.
 */

import { refresh } from "./live.js";

const TOKEN = "perilune.token";

/**
 * @typedef {{ title: string, button: string, leave: string, lines: { text: string, tone: string }[], typed: string,
 *   method: string, path: string, body: Record<string, unknown> | null }} Act
 */

/** @param {string} selector @returns {HTMLElement} */
function part(selector) {
  const found = document.querySelector(`#act ${selector}`);
  if (found instanceof HTMLElement) return found;
  throw new Error(`the dialog has no ${selector}`);
}

/** @param {string} selector @returns {HTMLInputElement} */
function input(selector) {
  const found = part(selector);
  if (found instanceof HTMLInputElement) return found;
  throw new Error(`${selector} is no input`);
}

const dialog = document.getElementById("act");
/** @type {Act | null} */
let act = null;
let busy = false;

/** @param {string} text @param {"" | "bad" | "good"} tone */
function say(text, tone) {
  const line = part(".outcome");
  line.textContent = text;
  line.className = `outcome ${tone}`;
}

/** @param {string} kind @param {string} target */
async function open(kind, target) {
  if (!(dialog instanceof HTMLDialogElement)) return;
  let reply;
  try {
    const query = new URLSearchParams({ target });
    reply = await fetch(`/acts/${kind}?${query}`, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  } catch {
    tell("No answer from the control plane. Nothing was changed.");
    return;
  }
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) {
    tell(body.detail || body.title || "This cannot be done now.");
    return;
  }
  show(body);
  dialog.showModal();
}

/** @param {Act} found */
function show(found) {
  act = found;
  part("#act-title").textContent = found.title;
  part("#act-lines").replaceChildren(...found.lines.map(({ text, tone }) => {
    const item = document.createElement("li");
    item.textContent = text;
    item.className = `tone-${tone}`;
    return item;
  }));
  part('[data-part="typed"]').hidden = !found.typed;
  part("#act-name").textContent = found.typed;
  part('[data-part="token"]').hidden = Boolean(sessionStorage.getItem(TOKEN));
  part("#act-yes").textContent = found.button;
  part("[data-closes]").textContent = found.leave;
  for (const name of ["#act-typed", "#act-reason", "#act-token"]) input(name).value = "";
  say("", "");
}

/** Why nothing opened: said to everybody, without a dialog. @param {string} text */
function tell(text) {
  act = null;
  if (!(dialog instanceof HTMLDialogElement)) return;
  part("#act-title").textContent = text;
  part("#act-lines").replaceChildren();
  part('[data-part="typed"]').hidden = true;
  part('[data-part="token"]').hidden = true;
  part("#act-yes").textContent = "Close";
  part("[data-closes]").textContent = "Cancel";
  say("", "");
  dialog.showModal();
}

function ready() {
  if (!act) return false;
  if (act.typed && input("#act-typed").value.trim() !== act.typed) {
    say(`Type ${act.typed} first.`, "bad");
    input("#act-typed").focus();
    return false;
  }
  const typed = input("#act-token").value.trim();
  if (typed) sessionStorage.setItem(TOKEN, typed);
  if (!sessionStorage.getItem(TOKEN)) {
    say("Paste the operator's token first.", "bad");
    input("#act-token").focus();
    return false;
  }
  return true;
}

async function send() {
  if (!act || busy || !ready()) return;
  busy = true;
  say("Asking the control plane ...", "");
  const reason = input("#act-reason").value.trim();
  const url = new URL(act.path, location.href);
  if (!act.body && reason) url.searchParams.set("reason", reason);
  try {
    const reply = await fetch(url, {
      method: act.method,
      signal: AbortSignal.timeout(15_000),
      headers: {
        "Content-Type": "application/json",
        Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}`,
      },
      body: act.body ? JSON.stringify({ ...act.body, reason }) : undefined,
    });
    const body = await reply.json().catch(() => ({}));
    if (reply.ok && body.cancelled) cancelled(body.cancelled);
    else if (reply.ok) done(body.job ?? body);
    else refused(reply.status, body);
  } catch {
    say("No answer from the control plane: look at Jobs, or Doctor, before trying again.", "bad");
  } finally {
    busy = false;
  }
}

/** @param {{ request_id: string, gateway: string, state: string }} request */
function cancelled(request) {
  const state = request.state.replace("_", " ");
  finished(`Cancelled request ${request.request_id} at ${request.gateway}, which was ${state}.`);
}

/** @param {{ id?: number, kind?: string, state?: string, number?: number, total?: number }} job */
function done(job) {
  const run = `Run ${job.number} of the doctor has begun: ${job.total} answers are awaited.`;
  finished(job.number === undefined ? `Job ${job.id} ${job.kind} is ${job.state}.` : run);
}

/** @param {string} text */
function finished(text) {
  say(text, "good");
  act = null;
  part("#act-yes").textContent = "Close";
  part("[data-closes]").textContent = "Cancel";
  part('[data-part="token"]').hidden = true;
  part('[data-part="typed"]').hidden = true;
  void refresh();
}

/** @param {number} status @param {{ title?: string, detail?: string, way_out?: string }} problem */
function refused(status, problem) {
  if (status === 401 || status === 403) {
    sessionStorage.removeItem(TOKEN);
    part('[data-part="token"]').hidden = false;
  }
  const text = [problem.detail || problem.title || `Refused with status ${status}.`, problem.way_out];
  say(`Nothing was done: ${text.filter(Boolean).join(" ")}`, "bad");
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("[data-act]") : null;
  if (button instanceof HTMLElement) void open(button.dataset.act ?? "", button.dataset.target ?? "");
});

document.getElementById("act-form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  if (act) void send();
  else if (dialog instanceof HTMLDialogElement) dialog.close();
});
