/* The last part: everything is there, so the page may begin. */
setInterval(() => {
  if (last && $("lost").hidden && !document.hidden && Date.now() / 1000 - heard > 3) say($("link"), `nothing heard for ${ago(Date.now() / 1000 - heard)}`);
}, 1000);
start();
