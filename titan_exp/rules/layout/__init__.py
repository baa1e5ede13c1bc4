"""Rules of the layout: degrees of the mesh, and what each axis divides."""
