// ---- all of it ------------------------------------------------------------------------------------------------------------------
drawRanks();
drawRank();
drawPipeline();
drawMemory();
drawTime();
drawSent();
choose(0);
