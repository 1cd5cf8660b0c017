//! Checkpoints: reading, refusing, quantizing, and the command that does it.

mod bundle;
mod command;
mod reading;
mod refusals;
mod support;
mod torchao;
mod torchao_numbers;
