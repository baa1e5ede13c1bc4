"""Machine diagnostics: measures compute, memory and link rates against data sheets, and the numerics of a recipe."""
