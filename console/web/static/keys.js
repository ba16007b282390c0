/** The console's letters on the page. They are off while typing, and can be switched off. */

const SWITCH = "perilune.keys";

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

function keysAreOn() {
  return localStorage.getItem(SWITCH) !== "off";
}

const help = document.getElementById("help");
const nav = document.getElementById("nav");
const menu = document.getElementById("menu");

/** @param {boolean} open */
function setDrawer(open) {
  nav?.classList.toggle("open", open);
  menu?.setAttribute("aria-expanded", String(open));
  if (open) nav?.querySelector("a")?.focus();
  else if (nav?.contains(document.activeElement)) menu?.focus();
}

function openHelp() {
  if (help instanceof HTMLDialogElement && !help.open) help.showModal();
}

/** @param {string} key */
function goTo(key) {
  const link = document.querySelector(`#nav [data-letter="${CSS.escape(key)}"]`);
  if (link instanceof HTMLAnchorElement) location.assign(link.href);
  return link !== null;
}

/** Next or previous view of this page. @param {number} step */
function turn(step) {
  const tabs = [...document.querySelectorAll("[data-views] a")];
  const here = tabs.findIndex((tab) => tab.hasAttribute("aria-current"));
  const next = tabs[(here + step + tabs.length) % tabs.length];
  if (here >= 0 && next instanceof HTMLAnchorElement) location.assign(next.href);
  return here >= 0;
}

/** Focus, or follow, what carries this letter on the page. @param {string} key */
function press(key) {
  const target = document.querySelector(`main [data-letter="${CSS.escape(key)}"]`);
  if (target instanceof HTMLInputElement) {
    target.focus();
    target.select();
  } else if (target instanceof HTMLElement) target.click();
  return target !== null;
}

/** Move between the rows' links. @param {number} step */
function walk(step) {
  const links = [...document.querySelectorAll("main tbody th a, main tbody td a")];
  const here = links.findIndex((link) => link === document.activeElement);
  const next = links[here < 0 ? 0 : Math.min(links.length - 1, Math.max(0, here + step))];
  if (next instanceof HTMLElement) next.focus();
  return next !== undefined;
}

/** @param {string} text */
async function copy(text) {
  const said = document.getElementById("announcer");
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  if (said) said.textContent = done ? "Copied." : "The browser does not allow copying here.";
}

/** @type {Record<string, () => boolean>} */
const COMMANDS = {
  "?": () => (openHelp(), true),
  "[": () => turn(-1),
  "]": () => turn(1),
  j: () => walk(1),
  k: () => walk(-1),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && nav?.classList.contains("open")) return setDrawer(false);
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return undefined;
  if (event.key === "Escape" && isTyping(event.target) && event.target instanceof HTMLElement) {
    return event.target.blur();
  }
  if (isTyping(event.target) || !keysAreOn() || document.querySelector("dialog[open]")) return undefined;
  const act = COMMANDS[event.key];
  const done = act ? act() : goTo(event.key) || press(event.key);
  if (!done && event.key === "y") void copy(location.href);
  if (done) event.preventDefault();
  return undefined;
});

document.addEventListener("click", (event) => {
  const target = event.target instanceof Element ? event.target : null;
  if (target?.closest("#menu")) setDrawer(!nav?.classList.contains("open"));
  else if (nav?.classList.contains("open") && !target?.closest("#nav")) setDrawer(false);
  if (target?.closest("[data-opens-help]")) openHelp();
  if (target?.closest("[data-closes]")) target.closest("dialog")?.close();
  if (target?.closest("[data-copy]")) void copy(target.closest(".copy")?.querySelector("code")?.textContent ?? "");
});

const toggle = document.getElementById("keys-on");
if (toggle instanceof HTMLInputElement) {
  toggle.checked = keysAreOn();
  toggle.addEventListener("change", () => localStorage.setItem(SWITCH, toggle.checked ? "on" : "off"));
}
