"""Pages: each reads what it shows by REST and hands view-model values to its template."""
