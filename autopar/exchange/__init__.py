"""Plans in the formats that other systems read: a program's plan as a `Layout`, a `Layout` as files, and both ways back."""
