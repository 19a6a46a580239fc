"""The nouns of the compiler: meshes, specs, rules, templates, programs. Data only; nothing here decides or runs."""
