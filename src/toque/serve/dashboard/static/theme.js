// Before the first paint, so that nothing flashes: the theme that was chosen, or the system's.
(() => {
  const chosen = localStorage.getItem("toque-theme") || "system";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen === "system" ? (dark ? "dark" : "light") : chosen;
})();
