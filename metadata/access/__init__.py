"""How it is read and changed: typed layers over any `MetadataStore`."""
