// Entry point: draws all plots of the page.

for (const mark of document.querySelectorAll("i[data-color]")) mark.style.background = color(Number(mark.dataset.color));
sortable();
lossCurves();
bars();
pareto();
scaling();
