/**
 * Makes a piece of the page equal to a newer rendering of it, touching only what differs, so that
 * focus, scroll, selection, open details and typed text stay. Elements with `data-key` or `id`
 * are the same element wherever they stand; `data-keep` marks what scripts own.
 */

const KEPT_ATTRIBUTES = new Set(["open", "aria-expanded", "data-released", "data-shown"]);

/** @param {Node} node @returns {string} */
function keyOf(node) {
  if (!(node instanceof Element)) return "";
  return node.getAttribute("data-key") ?? node.id ?? "";
}

/** @param {Node} a @param {Node} b */
function sameKind(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
}

/** @param {Element} from @param {Element} to */
export function morph(from, to) {
  if (from.hasAttribute("data-keep")) return;
  morphAttributes(from, to);
  if (from instanceof HTMLInputElement || from instanceof HTMLTextAreaElement) return;
  if (from.hasAttribute("data-rows")) morphRows(from, to);
  else morphChildren(from, to);
}

/** @param {Element} from @param {Element} to */
function morphAttributes(from, to) {
  for (const { name, value } of to.attributes) {
    if (KEPT_ATTRIBUTES.has(name) || from.getAttribute(name) === value) continue;
    from.setAttribute(name, value);
  }
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !KEPT_ATTRIBUTES.has(name)) from.removeAttribute(name);
  }
}

/** @param {Node} from @param {Node} to */
function morphNode(from, to) {
  if (from instanceof Element && to instanceof Element) morph(from, to);
  else if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
}

/** @param {Element} from @param {Element} to */
function morphChildren(from, to) {
  /** @type {Map<string, ChildNode>} */
  const keyed = new Map();
  for (const child of from.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
  /** @type {ChildNode | null} */
  let cursor = from.firstChild;
  for (const next of [...to.childNodes]) {
    const key = keyOf(next);
    /** @type {ChildNode | null | undefined} */
    let match = key ? keyed.get(key) : cursor;
    if (match && !sameKind(match, next)) match = null;
    if (!match) {
      from.insertBefore(document.importNode(next, true), cursor);
      continue;
    }
    if (match === cursor) cursor = cursor.nextSibling;
    else from.insertBefore(match, cursor);
    morphNode(match, next);
  }
  while (cursor) {
    const after = cursor.nextSibling;
    cursor.remove();
    cursor = after;
  }
}

/**
 * Rows of a table. While it is hovered, focused or scrolled past, its rows keep their places: their
 * cells change, new rows wait behind the button, vanished rows stay, dimmed.
 * @param {Element} from @param {Element} to
 */
function morphRows(from, to) {
  const button = document.querySelector(`[data-held-for="${from.id}"]`);
  const held = isHeld(from);
  const waiting = held ? mergeInPlace(from, to) : 0;
  if (!held) morphChildren(from, to);
  if (!(button instanceof HTMLElement)) return;
  button.hidden = waiting === 0;
  const label = button.querySelector("button");
  if (label) label.textContent = `${waiting} new`;
}

/** @param {Element} body */
function isHeld(body) {
  if (body.hasAttribute("data-released")) {
    body.removeAttribute("data-released");
    return false;
  }
  const above = body.getBoundingClientRect().top < 0;
  return above || body.matches(":hover, :focus-within");
}

/** @param {Element} from @param {Element} to @returns {number} rows that wait */
function mergeInPlace(from, to) {
  /** @type {Map<string, Element>} */
  const fresh = new Map([...to.children].map((row) => [keyOf(row), row]));
  for (const row of from.children) {
    const next = fresh.get(keyOf(row));
    row.classList.toggle("gone", !next);
    if (next) {
      morph(row, next);
      fresh.delete(keyOf(row));
    }
  }
  return fresh.size;
}
