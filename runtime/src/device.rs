//! What a session needs of a device.
//!
//! The interface lets a device run ahead: between [`DeviceSession::start`] and
//! [`DeviceSession::finish`] the host only asks for tokens, so a device may have later steps in
//! flight that read their token and position from its own memory. Nothing asks for logits
//! between two tokens.

use std::sync::Arc;

use gemma4_format::BufferId;

use crate::{Error, LoadedProgram, Result, Sampling};

/// A program whose weights a device can reach.
pub trait Device {
    /// The program.
    fn program(&self) -> &Arc<LoadedProgram>;

    /// The device in a few words, for reports.
    fn describe(&self) -> String;

    /// Allocates what one session needs: buffers for `context` tokens, and values for calls of
    /// up to `chunk` rows. Both are at least 1 and within the program's maxima.
    ///
    /// Fails with [`crate::Error::Memory`] if that does not fit; allocates nothing later.
    fn open_session(&self, context: u32, chunk: u32) -> Result<Box<dyn DeviceSession>>;
}

/// The buffers of one session, and the calls that change them.
///
/// [`crate::Session`] checks tokens and positions before it calls: ids are below the vocabulary,
/// `1 <= rows <= chunk`, `position + rows <= context`, and all positions before `position` hold
/// keys. A device need not check them again.
pub trait DeviceSession: Send {
    /// Runs `prefill` on the tokens of positions `position ..`.
    fn prefill(&mut self, tokens: &[u32], position: u32) -> Result<()>;

    /// Runs `decode` on a given token.
    fn decode(&mut self, token: u32, position: u32) -> Result<()>;

    /// Runs `verify` on the tokens of positions `position ..`, no more than the program's `verify`
    /// takes, which has that method.
    fn verify(&mut self, tokens: &[u32], position: u32) -> Result<()>;

    /// Logits after a token of the last call; length of the vocabulary. `row` counts the tokens of
    /// a `verify` from 0; of a `prefill` and a `decode` only the last token has logits, as row 0.
    fn logits(&mut self, row: u32) -> Result<Vec<f32>>;

    /// Begins to generate. The first token is drawn from the logits of the last call's last token
    /// and has position `position`; every further one comes from a decode step that is fed with the one
    /// before. No more than `limit` tokens will be asked for.
    fn start(&mut self, position: u32, sampling: &Sampling, limit: u32) -> Result<()>;

    /// The next token of the generation, stop tokens included.
    fn next_token(&mut self) -> Result<u32>;

    /// Ends the generation and returns the position after the last one that any step has written
    /// to the buffers, steps that ran ahead included.
    fn finish(&mut self) -> Result<u32>;

    /// The bytes of the first `rows` rows of a buffer, as [`DeviceSession::write_buffer`] takes
    /// them.
    fn read_buffer(&mut self, _buffer: BufferId, _rows: u32) -> Result<Vec<u8>> {
        Err(Error::Device("sessions are saved and restored on the CPU alone".to_owned()))
    }

    /// Writes the first rows of a buffer.
    fn write_buffer(&mut self, _buffer: BufferId, _rows: &[u8]) -> Result<()> {
        Err(Error::Device("sessions are saved and restored on the CPU alone".to_owned()))
    }

    /// Largest memory used on the device in bytes, if it has its own.
    fn peak_memory(&self) -> Option<u64> {
        None
    }
}
