/**
 * Editing a policy: the server checks the draft and says what it would do, the operator agrees,
 * then one PUT with If-Match. Errors stand on the line they concern.
 * The token lives in this tab's session storage and goes nowhere but into the Authorization header.
 */

import { refresh } from "./live.js";

const TOKEN = "perilune.token";

/**
 * @typedef {{ text: string, tone: string }} Line
 * @typedef {{ errors: Record<string, string>, spec: object | null, changes: Line[], effects: Line[],
 *   conflict: string, active: { revision: number, texts: Record<string, string> } }} Check
 * @typedef {{ title?: string, detail?: string, field?: string | null, way_out?: string | null }} Problem
 */

class PolicyForm {
  /** @param {HTMLFormElement} form @param {HTMLDialogElement} dialog */
  constructor(form, dialog) {
    this.form = form;
    this.dialog = dialog;
    /** @type {object | null} */
    this.spec = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.review();
    });
    form.addEventListener("click", (event) => this.#onClick(event));
    dialog.querySelector("#agree-yes")?.addEventListener("click", () => {
      dialog.close();
      void this.put();
    });
    form.addEventListener("change", () => this.#showParameters());
    document.addEventListener("perilune:shown", (event) => this.#onShown(event));
    this.#showToken();
  }

  /** @returns {HTMLElement[]} */
  get lines() {
    return [...this.form.querySelectorAll("[data-line]")].filter((line) => line instanceof HTMLElement);
  }

  /** @param {HTMLElement} line */
  #input(line) {
    const input = line.querySelector("input, select");
    if (input instanceof HTMLInputElement || input instanceof HTMLSelectElement) return input;
    throw new Error(`line ${line.dataset.line} has no input`);
  }

  get isDirty() {
    return this.lines.some((line) => this.#input(line).value !== line.dataset.old);
  }

  /** @returns {Promise<Check>} */
  async #check() {
    const url = new URL(this.form.dataset.check ?? "", location.href);
    for (const line of this.lines) url.searchParams.set(line.dataset.line ?? "", this.#input(line).value);
    url.searchParams.set("base", this.form.dataset.revision ?? "");
    const reply = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(8_000) });
    if (!reply.ok) throw new Error(String(reply.status));
    return reply.json();
  }

  async review() {
    this.#clear();
    if (!this.#takeToken()) {
      this.#showError("token", "Paste the operator's token first.");
      return;
    }
    let check;
    try {
      check = await this.#check();
    } catch {
      this.#say("No answer from the control plane. Nothing was changed; your values are kept.", "bad");
      return;
    }
    this.spec = check.spec;
    const wrong = Object.entries(check.errors);
    for (const [name, text] of wrong) this.#showError(name, text);
    if (check.conflict) this.#offerRebase(check.conflict);
    else if (wrong.length || !check.spec) this.#say("Nothing was changed.", "bad");
    else if (!this.isDirty) this.#say(check.changes[0]?.text ?? "", "");
    else this.#ask(check);
  }

  /** @param {Check} check */
  #ask(check) {
    fill("agree-changes", check.changes);
    fill("agree-effects", check.effects);
    this.dialog.showModal();
  }

  async put() {
    this.#say("Writing ...", "");
    const reason = this.form.elements.namedItem("reason");
    let reply;
    try {
      reply = await fetch(this.form.dataset.api ?? "", {
        method: "PUT",
        signal: AbortSignal.timeout(10_000),
        headers: {
          "Content-Type": "application/json",
          "If-Match": `"${this.form.dataset.revision}"`,
          Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}`,
        },
        body: JSON.stringify({ spec: this.spec, reason: reason instanceof HTMLInputElement ? reason.value : "" }),
      });
    } catch {
      this.#say("No answer from the control plane: look which revision is active before trying again.", "bad");
      return;
    }
    const body = await reply.json().catch(() => ({}));
    if (reply.ok) await this.#done(body);
    else await this.#refused(reply.status, body);
  }

  /** @param {{ active: { revision: number }, pending_gateways: string[] }} reply */
  async #done(reply) {
    this.form.dataset.revision = String(reply.active.revision);
    for (const line of this.lines) line.dataset.old = this.#input(line).value;
    const late = reply.pending_gateways.length
      ? `Not yet acknowledged by ${reply.pending_gateways.join(", ")}; they take it when they are back.`
      : this.form.dataset.acts ?? "";
    this.#say(`r${reply.active.revision} is active. ${late}`, "good");
    this.#showToken();
    await refresh();
  }

  /** @param {number} status @param {Problem} problem */
  async #refused(status, problem) {
    const text = [problem.detail || problem.title || `Refused with status ${status}.`, problem.way_out]
      .filter(Boolean).join(" ");
    if (status === 401 || status === 403) {
      sessionStorage.removeItem(TOKEN);
      this.#showToken();
      this.#showError("token", text);
      this.#say("Nothing was changed.", "bad");
    } else if (status === 412) {
      const check = await this.#check().catch(() => null);
      this.#offerRebase(check?.conflict || text);
    } else {
      const placed = problem.field ? this.#showError(problem.field, text) : false;
      this.#say(placed ? "Nothing was changed." : text, "bad");
    }
  }

  /** @param {string} text */
  #offerRebase(text) {
    this.#say(text, "bad");
    this.#button("[data-rebase]").hidden = false;
  }

  /** The same changes on top of the active revision; untouched lines follow it. */
  async rebase() {
    const check = await this.#check().catch(() => null);
    if (check) this.#takeBase(check.active.revision, check.active.texts);
  }

  /** @param {number} revision @param {Record<string, string>} texts */
  #takeBase(revision, texts) {
    for (const line of this.lines) {
      const input = this.#input(line);
      const text = texts[line.dataset.line ?? ""] ?? "";
      if (input.value === line.dataset.old) input.value = text;
      line.dataset.old = text;
    }
    this.form.dataset.revision = String(revision);
    this.#button("[data-rebase]").hidden = true;
    this.#showParameters();
    this.#clear();
  }

  drop() {
    for (const line of this.lines) this.#input(line).value = line.dataset.old ?? "";
    this.#showParameters();
    this.#clear();
  }

  /** Of the parameters, those of the eviction policy that is chosen now. */
  #showParameters() {
    const chosen = this.lines.find((line) => line.dataset.line === "eviction");
    if (!chosen) return;
    const name = this.#input(chosen).value;
    for (const line of this.lines) if (line.dataset.when) line.hidden = line.dataset.when !== name;
  }

  /** A newer rendering of the page: an untouched form follows it. @param {Event} event */
  #onShown(event) {
    const next = event instanceof CustomEvent ? event.detail.querySelector("#policy-form") : null;
    if (!(next instanceof HTMLFormElement) || this.isDirty) return;
    if (next.dataset.revision === this.form.dataset.revision) return;
    /** @type {Record<string, string>} */
    const texts = {};
    for (const line of next.querySelectorAll("[data-line]")) {
      if (line instanceof HTMLElement) texts[line.dataset.line ?? ""] = line.dataset.old ?? "";
    }
    this.#takeBase(Number(next.dataset.revision), texts);
  }

  /** @param {Event} event */
  #onClick(event) {
    const target = event.target instanceof Element ? event.target : null;
    if (target?.closest("[data-rebase]")) void this.rebase();
    if (target?.closest("[data-drop]")) this.drop();
    if (target?.closest("[data-forget-token]")) {
      sessionStorage.removeItem(TOKEN);
      this.#showToken();
    }
  }

  /** @returns {boolean} whether this tab now holds a token */
  #takeToken() {
    const typed = this.form.elements.namedItem("token");
    if (typed instanceof HTMLInputElement && typed.value.trim()) {
      sessionStorage.setItem(TOKEN, typed.value.trim());
      typed.value = "";
      this.#showToken();
    }
    return Boolean(sessionStorage.getItem(TOKEN));
  }

  /** The field for the token is there only while none is held. */
  #showToken() {
    const has = Boolean(sessionStorage.getItem(TOKEN));
    this.#button('[data-line-extra="token"]').hidden = has;
    this.#button("[data-token-held]").hidden = !has;
  }

  /** @param {string} name @param {string} text */
  #showError(name, text) {
    const line = this.lines.find((one) => name === one.dataset.line || name.endsWith(`.${one.dataset.line}`))
      ?? this.form.querySelector(`[data-line-extra="${CSS.escape(name)}"]`);
    const place = line?.querySelector(".error");
    if (!line || !place) return false;
    place.textContent = text;
    const input = line.querySelector("input, select");
    input?.setAttribute("aria-invalid", "true");
    if (input instanceof HTMLElement) input.focus();
    return true;
  }

  #clear() {
    for (const place of this.form.querySelectorAll(".error")) place.textContent = "";
    for (const input of this.form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    this.#say("", "");
  }

  /** @param {string} text @param {"" | "good" | "bad"} tone */
  #say(text, tone) {
    const line = this.#button(".outcome");
    line.textContent = text;
    line.className = `outcome ${tone}`;
  }

  /** @param {string} selector @returns {HTMLElement} */
  #button(selector) {
    const found = this.form.querySelector(selector);
    if (found instanceof HTMLElement) return found;
    throw new Error(`the form has no ${selector}`);
  }
}

/** @param {string} id @param {Line[]} lines */
function fill(id, lines) {
  document.getElementById(id)?.replaceChildren(...lines.map(({ text, tone }) => {
    const item = document.createElement("li");
    item.textContent = text;
    item.className = `tone-${tone}`;
    return item;
  }));
}

const form = document.getElementById("policy-form");
const dialog = document.getElementById("agree");
if (form instanceof HTMLFormElement && dialog instanceof HTMLDialogElement) new PolicyForm(form, dialog);
