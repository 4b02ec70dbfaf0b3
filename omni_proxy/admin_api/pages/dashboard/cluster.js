/* The proxies of a cluster: a row for each, and sums over all of them. A proxy of an older release reports only its requests
   in flight. */
clearOnSignOut("proxy-rows", "proxies-summary", "proxy-name");
const nodeName = (member) => String(member ?? "").replace(/\/[0-9a-f]+$/, "");
const clusterPeers = () => snapshot.cluster?.peers ?? [];
const inCluster = () => clusterPeers().length > 0;
/* The sum over all proxies; `own`: the value of this one. */
const clusterSum = (own, name) => clusterPeers().reduce((sum, peer) => sum + (peer[name] ?? 0), own ?? 0);
/* A worker's value through all proxies. Its requests in flight already include the other proxies. */
const totalRate = (worker) => worker.rate + (worker.elsewhere?.requests_per_sec ?? 0);
const totalErrors = (worker) => worker.errors + (worker.elsewhere?.errors ?? 0);
function totalTokens(worker) {
  const own = worker.minute?.output_tokens_per_sec, others = worker.elsewhere?.output_tokens_per_sec;
  return hasValue(own) || others ? (own ?? 0) + (others ?? 0) : null;
}
/* The part that went through this proxy; "" without another one. */
const ownShareText = (worker, own) => worker.elsewhere ? `${own} through this proxy` : "";

function renderProxies() {
  const cluster = snapshot.cluster;
  setVisible($("proxies"), Boolean(cluster));
  setVisible($("proxy-name"), Boolean(cluster?.self?.member));
  for (const element of document.querySelectorAll(".this-proxy")) setVisible(element, inCluster());
  if (!cluster) return;
  const name = nodeName(cluster.self?.member);
  setText($("proxy-name"), name && `proxy ${name}`);
  const shown = cluster.peers.length ? `${pluralize(cluster.members, "proxy").replace(/proxys$/, "proxies")}; figures of the fleet and of workers are sums over all proxies` : "no other proxy";
  setText($("proxies-summary"), [`cluster ${cluster.name}`, cluster.connected ? shown : `store disconnected: ${cluster.error ?? "connecting"}`].join(": "));
  setClass($("proxies-summary"), cluster.connected ? "muted small grow" : "error small grow");
  const own = { ...cluster.self, version: snapshot.version, uptime_secs: snapshot.uptime_secs, waiting: snapshot.admission?.waiting, loop_lag_ms: snapshot.data_plane?.loop_lag_ms };
  const rows = [own, ...cluster.peers].sort((a, b) => nodeName(a.member).localeCompare(nodeName(b.member), "en", { numeric: true }));
  replaceIfChanged($("proxy-rows"), rows, () => rows.map((proxy) => createProxyRow(proxy, proxy === own)));
}
function createProxyRow(proxy, isThis) {
  const name = nodeName(proxy.member) || "this proxy", url = isThis ? "" : reachableUrl(proxy.dashboard);
  const link = url ? createElement("a", "", name) : createElement("b", "", name);
  if (url) Object.assign(link, { href: url, title: `dashboard of ${name}: ${url}` });
  const isLagging = proxy.loop_lag_ms > 100, version = proxy.version ?? "an older release";
  const cells = [
    ["Version", createElement("span", version === snapshot.version ? "" : "warning", version)],
    ["Uptime", hasValue(proxy.uptime_secs) ? formatDuration(proxy.uptime_secs) : "–"],
    ["Last seen", isThis ? "–" : `${formatDuration(proxy.age_secs)} ago`],
    ["In flight", formatNumber(proxy.in_flight)], ["Queued", hasValue(proxy.waiting) ? formatNumber(proxy.waiting) : proxy.waits ? "some" : "–"],
    ["Req/s", formatNumber(proxy.requests_per_sec)], ["Errors", createElement("span", proxy.errors_last_minute ? "error" : "", formatNumber(proxy.errors_last_minute))],
    ["Tokens/s", formatNumber(proxy.output_tokens_per_sec)], ["Loop lag", createElement("span", isLagging ? "warning" : "", formatMillis(proxy.loop_lag_ms))],
  ].map(([label, value], index) => {
    const element = createElement("td", index > 2 ? "num" : "", value);
    element.dataset.name = label;
    return element;
  });
  const head = createElement("th", "", link, isThis ? createElement("span", "badge info", "this page") : null);
  head.scope = "row";
  return createElement("tr", "", head, ...cells);
}
/* The URL of the peer's page for this browser; "" if only the peer's own machine reaches it. */
const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;
function reachableUrl(url) {
  if (!URL.canParse(url ?? "")) return "";
  const target = new URL(url);
  return /^https?:$/.test(target.protocol) && (!LOOPBACK.test(target.hostname) || LOOPBACK.test(location.hostname)) ? target.href : "";
}
