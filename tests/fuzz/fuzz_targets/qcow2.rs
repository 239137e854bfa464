#![no_main]

vellum_fuzz::target!(qcow2);
