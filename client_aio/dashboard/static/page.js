// Live updates: the server sends the regions of the page that have changed, and `morph` puts them in place.
// Elements that stay are kept, so that focus, scrolling, and what is typed into a form stay as they are.

const RETRY_MS = 2000;
let source = null;
let retry = 0;

function say(text) {
  const place = document.getElementById("connection");
  if (place.textContent !== text) place.textContent = text;
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key ?? node.id : undefined;
}

function isSame(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);
}

function morphAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.childNodes) {
    const key = keyOf(child);
    if (key) keyed.set(key, child);
  }
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    let found = key ? keyed.get(key) : at;
    if (found && !isSame(found, wanted)) found = undefined;
    if (found === undefined || found === null) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else old.insertBefore(found, at);
    morph(found, wanted);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  morphAttributes(old, fresh);
  morphChildren(old, fresh);
}

function update({ title, regions }) {
  document.title = title;
  for (const [id, markup] of Object.entries(regions)) {
    const region = document.getElementById(id);
    if (!region) continue;
    const parsed = new DOMParser().parseFromString(`<div>${markup}</div>`, "text/html");
    morphChildren(region, parsed.body.firstChild);
  }
}

function begin() {
  clearTimeout(retry);
  if (source || document.hidden) return;
  source = new EventSource(document.body.dataset.live);
  source.onopen = () => say("");
  source.onmessage = (event) => update(JSON.parse(event.data));
  source.onerror = () => {
    say("The status page does not answer. What is shown may be old.");
    end();
    retry = setTimeout(begin, RETRY_MS);
  };
}

function end() {
  source?.close();
  source = null;
}

// A hidden page takes no updates: a browser keeps only a few connections to one server.
document.addEventListener("visibilitychange", () => (document.hidden ? end() : begin()));
addEventListener("pagehide", end);
begin();
