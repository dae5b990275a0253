"""What plugin authors test with: fakes, references and a conformance suite per role."""
