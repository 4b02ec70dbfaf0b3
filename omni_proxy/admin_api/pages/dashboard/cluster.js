/* The proxies of a cluster: a row for each, and sums over all of them. A proxy of an older release reports only its requests
   in flight. */
empties("proxy-rows", "proxies-says", "node");
const nodeName = (member) => String(member ?? "").replace(/\/[0-9a-f]+$/, "");
const peersNow = () => last.cluster?.peers ?? [];
const inCluster = () => peersNow().length > 0;
/* The sum over all proxies; `own`: the value of this one. */
const everywhere = (own, name) => peersNow().reduce((sum, peer) => sum + (peer[name] ?? 0), own ?? 0);
/* A worker's value through all proxies. Its requests in flight already include the other proxies. */
const allRate = (worker) => worker.rate + (worker.elsewhere?.requests_per_sec ?? 0);
const allErrors = (worker) => worker.errors + (worker.elsewhere?.errors ?? 0);
function allTokens(worker) {
  const own = worker.minute?.output_tokens_per_sec, others = worker.elsewhere?.output_tokens_per_sec;
  return known(own) || others ? (own ?? 0) + (others ?? 0) : null;
}
/* The part that went through this proxy; "" without another one. */
const ofThis = (worker, own) => worker.elsewhere ? `${own} through this proxy` : "";

function paintProxies() {
  const cluster = last.cluster;
  show($("proxies"), Boolean(cluster));
  show($("node"), Boolean(cluster?.self?.member));
  for (const it of document.querySelectorAll(".this-proxy")) show(it, inCluster());
  if (!cluster) return;
  const name = nodeName(cluster.self?.member);
  say($("node"), name && `this is ${name}`);
  const shown = cluster.peers.length ? `${one(cluster.members, "proxy").replace(/proxys$/, "proxies")} over one fleet; figures of the fleet and of workers are their sums` : "no other proxy";
  say($("proxies-says"), [`cluster ${cluster.name}`, cluster.connected ? shown : `the store is lost: ${cluster.error ?? "connecting"}`].join(": "));
  dress($("proxies-says"), cluster.connected ? "quiet small grow" : "bad small grow");
  const own = { ...cluster.self, version: last.version, uptime_secs: last.uptime_secs, waiting: last.admission?.waiting, loop_lag_ms: last.data_plane?.loop_lag_ms };
  const rows = [own, ...cluster.peers].sort((a, b) => nodeName(a.member).localeCompare(nodeName(b.member), "en", { numeric: true }));
  fill($("proxy-rows"), rows, () => rows.map((each) => proxyRow(each, each === own)));
}
function proxyRow(proxy, isThis) {
  const name = nodeName(proxy.member) || "this proxy", url = isThis ? "" : pageOf(proxy.dashboard);
  const link = url ? make("a", "", name) : make("b", "", name);
  if (url) Object.assign(link, { href: url, title: `its dashboard: ${url}` });
  const late = proxy.loop_lag_ms > 100, version = proxy.version ?? "an older release";
  const cells = [
    ["Version", make("span", version === last.version ? "" : "warn", version)],
    ["Up", known(proxy.uptime_secs) ? ago(proxy.uptime_secs) : "–"],
    ["Heard", isThis ? "–" : `${ago(proxy.age_secs)} ago`],
    ["In flight", count(proxy.in_flight)], ["Waiting", known(proxy.waiting) ? count(proxy.waiting) : proxy.waits ? "some" : "–"],
    ["Req/s", count(proxy.requests_per_sec)], ["Errors", make("span", proxy.errors_last_minute ? "bad" : "", count(proxy.errors_last_minute))],
    ["Tokens/s", count(proxy.output_tokens_per_sec)], ["Lag", make("span", late ? "warn" : "", millis(proxy.loop_lag_ms))],
  ].map(([words, value], at) => {
    const it = make("td", at > 2 ? "num" : "", value);
    it.dataset.name = words;
    return it;
  });
  const head = make("th", "", link, isThis ? make("span", "badge blue", "this page") : null);
  head.scope = "row";
  return make("tr", isThis ? "this" : "", head, ...cells);
}
/* The URL of the peer's page for this browser; "" if only the peer's own machine reaches it. */
const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;
function pageOf(url) {
  if (!URL.canParse(url ?? "")) return "";
  const there = new URL(url);
  return /^https?:$/.test(there.protocol) && (!LOOPBACK.test(there.hostname) || LOOPBACK.test(location.hostname)) ? there.href : "";
}
