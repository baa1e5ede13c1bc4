"""Machine diagnostics: measured compute, memory and link rates against data sheets; numerics of a recipe."""
