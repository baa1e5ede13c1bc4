// ---- all of it ------------------------------------------------------------------------------------------------------------------
const themed = [];
const themeButton = document.getElementById("theme");
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  for (const paint of themed) paint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const paint of themed) paint(); });
drawRanks();
drawRank();
drawPipeline();
drawMemory();
drawTime();
drawSent();
choose(0);
