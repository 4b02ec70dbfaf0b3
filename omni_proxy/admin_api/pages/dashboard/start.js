/* Starts the page. The last part, because it uses all others. */
setInterval(() => {
  if (snapshot && $("disconnected").hidden && !document.hidden && Date.now() / 1000 - snapshotReceivedAt > 3) setText($("connection"), `no data for ${formatDuration(Date.now() / 1000 - snapshotReceivedAt)}`);
}, 1000);
startFeed();
