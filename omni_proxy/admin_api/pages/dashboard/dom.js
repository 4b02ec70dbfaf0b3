/* Building and changing the page, and formatting numbers and times. Data from the network enters the page as text, never as
   markup; only nodes that differ are changed, so that nothing moves, loses its focus or is announced again. */
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, className, ...inside) {
  const it = document.createElement(tag);
  if (className) it.className = className;
  it.append(...inside.filter((each) => each !== null && each !== undefined && each !== ""));
  return it;
}
function draw(tag, attributes) {
  const it = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) it.setAttribute(name, value);
  return it;
}
function pressed(word, className, act) {
  const it = make("button", className, word);
  it.type = "button";
  it.addEventListener("click", (event) => {
    if (it.getAttribute("aria-disabled") !== "true") act(event, it);
    else if (it.why) report(it.why, "warn");
  });
  return it;
}
function say(it, text) { if (it.textContent !== text) it.textContent = text; }
function dress(it, className) { if (it.className !== className) it.className = className; }
function mark(it, name, value) { if (it.getAttribute(name) !== String(value)) it.setAttribute(name, value); }
function show(it, shown) { if (it.hidden === shown) it.hidden = !shown; }
function enable(button, is) { mark(button, "aria-disabled", !is); }
function fill(it, key, build) {
  const filled = JSON.stringify(key);
  if (it.filled === filled) return;
  it.filled = filled;
  it.replaceChildren(...build());
}
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return make("dl", "facts", ...shown.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

/* ---- formatting of numbers and times ---- */
const known = (value) => value !== null && value !== undefined;
function millis(ms) {
  if (!known(ms)) return "–";
  if (ms < 10) return ms.toFixed(1) + " ms";
  if (ms < 1000) return Math.round(ms) + " ms";
  return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
}
function count(value) {
  if (!known(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
const share = (value) => known(value) ? `${Math.round(100 * value)} %` : "–";
const one = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
function bytes(value) {
  if (!known(value)) return "–";
  return value < 1024 ? `${value} B` : value < 1048576 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / 1048576).toFixed(1)} MiB`;
}
function ago(secs) {
  if (secs < 90) return Math.max(0, Math.round(secs)) + " s";
  if (secs < 5400) return Math.round(secs / 60) + " min";
  return secs < 129600 ? Math.round(secs / 3600) + " h" : Math.round(secs / 86400) + " d";
}
/* Seconds since 1970, from a number or an ISO time. */
const seconds = (at) => typeof at === "number" ? at : Date.parse(at) / 1000;
function clock(at, withSeconds = true) {
  const when = new Date(seconds(at) * 1000);
  return Number.isNaN(when.getTime()) ? "" : when.toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });
}
/* The time, with its date if that is not today. */
function moment(at) {
  const day = new Date(seconds(at) * 1000).toDateString();
  return day === new Date().toDateString() ? clock(at) : `${day.slice(4, 10)}, ${clock(at)}`;
}
function utc(at) {
  const when = new Date(seconds(at) * 1000);
  return Number.isNaN(when.getTime()) ? "" : when.toISOString().replace("T", " ").slice(0, 19) + " UTC";
}
/* Local time; the tooltip and the machine-readable time are in UTC. */
function time(at, words = moment) {
  const it = make("time", "", words(at));
  it.title = utc(at);
  if (it.title) it.dateTime = new Date(seconds(at) * 1000).toISOString();
  return it;
}
const short = (url) => String(url ?? "").replace(/^https?:\/\//, "").replace(/\/$/, "");
const plain = (value) => typeof value === "string" ? value : JSON.stringify(value);
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};
