# filled by the packaging work
