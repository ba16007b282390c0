/* Runs before the first paint: says that scripts run, and in which zone the viewer reads times. */
(() => {
  document.documentElement.classList.add("js");
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const held = document.cookie.split("; ").find((part) => part.startsWith("perilune_tz="));
  if (zone && held !== `perilune_tz=${zone}`) {
    document.cookie = `perilune_tz=${zone}; path=/; max-age=31536000; SameSite=Lax`;
    document.documentElement.dataset.zoneChanged = "1";
  }
})();
