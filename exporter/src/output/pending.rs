//! A file that gets its name when it is complete.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// A file under a temporary name in its target's directory. Dropped, it is removed.
#[derive(Debug)]
pub struct Pending {
    temporary: NamedTempFile,
    target: PathBuf,
}

impl Pending {
    /// Creates the file that is to become `target`, and the directories above it.
    ///
    /// # Errors
    /// [`Error::OutputNotFile`] if `target` is there and no regular file: renaming would replace
    /// even a device or a link.
    pub fn create(target: impl Into<PathBuf>) -> Result<Self> {
        let target = target.into();
        if let Ok(found) = fs::symlink_metadata(&target)
            && !found.is_file()
        {
            let what = match found.file_type() {
                kind if kind.is_dir() => "a directory",
                kind if kind.is_symlink() => "a symbolic link",
                _ => "a device or pipe",
            };
            return Err(Error::OutputNotFile { path: target, what });
        }
        let dir = parent(&target);
        fs::create_dir_all(dir).map_err(Error::io("create directory", dir))?;
        let temporary = tempfile::Builder::new()
            .prefix(".gemma4-")
            .suffix(".tmp")
            // Less the umask: the mode that any other new file has.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .map_err(Error::io("create a file in", dir))?;
        Ok(Self { temporary, target })
    }

    /// Creates it with all its contents.
    pub fn with_bytes(target: impl Into<PathBuf>, bytes: &[u8]) -> Result<Self> {
        let pending = Self::create(target)?;
        pending.write_at(bytes, 0)?;
        Ok(pending)
    }

    /// The name that it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Sets its length; what is not written reads as zeros.
    pub fn set_length(&self, bytes: u64) -> Result<()> {
        self.temporary.as_file().set_len(bytes).map_err(self.failed())
    }

    /// Writes bytes at a place.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.temporary.as_file().write_all_at(bytes, offset).map_err(self.failed())
    }

    fn failed(&self) -> impl FnOnce(io::Error) -> Error {
        Error::io("write", &self.target)
    }
}

/// Gives several files their names, in order, when all of them are safely on the disk.
///
/// Each appears at once and whole. A crash in between leaves the first ones: write what others
/// refer to first.
pub fn persist_all(files: impl IntoIterator<Item = Pending>) -> Result<()> {
    let files: Vec<Pending> = files.into_iter().collect();
    for file in &files {
        file.temporary.as_file().sync_all().map_err(file.failed())?;
    }
    for Pending { temporary, target } in files {
        temporary.persist(&target).map_err(|e| Error::io("write", &target)(e.error))?;
        sync_dir(parent(&target))?;
    }
    Ok(())
}

/// Makes changes of names in a directory last.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write", dir))
}

/// The directory of a path; that of a bare name is the current one.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}
