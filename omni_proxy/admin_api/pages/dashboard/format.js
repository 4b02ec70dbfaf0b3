/* Formats numbers, times and URLs. */
const hasValue = (value) => value !== null && value !== undefined;
function formatMillis(ms) {
  if (!hasValue(ms)) return "–";
  if (ms < 10) return ms.toFixed(1) + " ms";
  if (ms < 1000) return Math.round(ms) + " ms";
  return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
}
function formatNumber(value) {
  if (!hasValue(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
const formatPercent = (value) => hasValue(value) ? `${Math.round(100 * value)} %` : "–";
const pluralize = (number, label) => `${formatNumber(number)} ${label}${number === 1 ? "" : "s"}`;
function formatBytes(value) {
  if (!hasValue(value)) return "–";
  return value < 1024 ? `${value} B` : value < 1048576 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / 1048576).toFixed(1)} MiB`;
}
function formatDuration(secs) {
  if (secs < 90) return Math.max(0, Math.round(secs)) + " s";
  if (secs < 5400) return Math.round(secs / 60) + " min";
  return secs < 129600 ? Math.round(secs / 3600) + " h" : Math.round(secs / 86400) + " d";
}
/* Seconds since 1970, from a number or an ISO time. */
const toSeconds = (at) => typeof at === "number" ? at : Date.parse(at) / 1000;
function formatTime(at, withSeconds = true) {
  const when = new Date(toSeconds(at) * 1000);
  return Number.isNaN(when.getTime()) ? "" : when.toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });
}
/* The time, with its date if that is not today. */
function formatDateTime(at) {
  const day = new Date(toSeconds(at) * 1000).toDateString();
  return day === new Date().toDateString() ? formatTime(at) : `${day.slice(4, 10)}, ${formatTime(at)}`;
}
function formatUtc(at) {
  const when = new Date(toSeconds(at) * 1000);
  return Number.isNaN(when.getTime()) ? "" : when.toISOString().replace("T", " ").slice(0, 19) + " UTC";
}
/* Local time; the tooltip and the machine-readable time are in UTC. */
function createTime(at, format = formatDateTime) {
  const element = createElement("time", "", format(at));
  element.title = formatUtc(at);
  if (element.title) element.dateTime = new Date(toSeconds(at) * 1000).toISOString();
  return element;
}
const shortUrl = (url) => String(url ?? "").replace(/^https?:\/\//, "").replace(/\/$/, "");
const toText = (value) => typeof value === "string" ? value : JSON.stringify(value);
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
